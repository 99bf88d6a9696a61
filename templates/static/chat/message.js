/** One message of the thread, with what can be done with it. */

import { cacheLine } from './cache_line.js';
import { copyFrom } from './clipboard.js';
import { element, iconButton, reconcile } from './dom.js';
import { errorBox } from './error_box.js';
import { errorText } from './errors.js';
import { formatMoment, formatNumber, gettext, interpolate } from './i18n.js';
import { Markdown } from './markdown.js';
import { isActive } from './tree.js';

/**
 * @typedef {object} Place where the message stands in the tree
 * @property {string[]} siblings ids, with its own
 * @property {boolean} isLast of the shown branch
 * @property {string} waiting what an answer without text waits for
 */

/** @param {Place} a @param {Place} b */
function isEqualPlace(a, b) {
  return a.isLast === b.isLast && a.waiting === b.waiting && a.siblings.join() === b.siblings.join();
}

/** Whether nothing but the text is new: the case at every token. */
function isContinued(before, item) {
  return (
    before.state === item.state &&
    before.sync === item.sync &&
    before.report === item.report &&
    (before.text === '') === (item.text === '')
  );
}

export class MessageView {
  #item = null;
  #place = null;
  #actions;
  #markdown = null;
  #editor = null;
  #drawnReport = null;
  #cacheLine = null;

  /**
   * @param {import('./store.js').Item} item
   * @param {import('./actions.js').Actions} actions
   */
  constructor(item, actions) {
    this.#actions = actions;
    const isUser = item.role === 'user';
    this.text = element('div', {
      class: isUser ? 'message-text bubble' : 'message-text prose',
      testid: 'message-text',
      dir: 'auto',
    });
    this.body = element('div', { class: 'message-body' }, this.text);
    this.footer = element('div', { class: 'message-footer' });
    this.element = element(
      'article',
      {
        class: `message message-${item.role}`,
        testid: 'message',
        'data-role': item.role,
        'data-id': item.id,
        'aria-label': isUser ? gettext('Your message') : gettext('Answer'),
      },
      this.body,
      this.footer,
    );
    if (isUser) this.text.title = formatMoment(item.createdAt);
    else this.#markdown = new Markdown(this.text);
  }

  /**
   * @param {import('./store.js').Item} item
   * @param {Place} place
   */
  update(item, place) {
    const isSamePlace = this.#place !== null && isEqualPlace(place, this.#place);
    if (isSamePlace && item === this.#item) return;
    const onlyTextGrew = isSamePlace && isContinued(this.#item, item);
    this.#item = item;
    this.#place = place;
    this.element.dataset.state = item.state;
    this.element.toggleAttribute('data-last', place.isLast);
    this.element.toggleAttribute('data-pending', item.role === 'user' && item.sync === 'pending');
    if (item.role === 'user') {
      if (this.text.textContent !== item.text) this.text.textContent = item.text;
    } else {
      this.#markdown.update(item.text, isActive(item));
    }
    if (!onlyTextGrew) this.#drawAround(item, place);
  }

  #drawAround(item, place) {
    const notes = [];
    if (isActive(item) && item.text === '') {
      notes.push(
        element('p', { class: 'waiting' }, element('span', { class: 'ember', 'aria-hidden': 'true' }), place.waiting),
      );
    }
    if (item.state === 'stopped') notes.push(element('p', { class: 'note' }, gettext('Stopped')));
    if (item.finishReason === 'length') {
      notes.push(element('p', { class: 'note' }, gettext('The answer has reached its longest length.')));
    }
    if (item.state === 'failed') {
      notes.push(errorBox(item.error, 'message-error', () => this.#actions.regenerate(item.parent)));
    }
    if (!this.#editor) reconcile(this.body, [this.text, ...notes]);
    this.text.hidden = item.text === '';

    if (item.report !== this.#drawnReport) {
      this.#drawnReport = item.report;
      this.#cacheLine = item.report && cacheLine(item.report);
    }
    const isBeingSent = item.role === 'user' && item.sync === 'pending';
    const tools = isActive(item) || isBeingSent ? [] : this.#tools(item, place);
    const branches = place.siblings.length > 1 ? [this.#branches(item, place)] : [];
    const row = element('div', { class: 'tools' }, ...branches, ...tools);
    const parts = this.#cacheLine ? [row, this.#cacheLine] : [row];
    this.#keepFocus(() => reconcile(this.footer, parts));
  }

  /** Buttons are made anew when the message changes; the one that has the focus passes it on. */
  #keepFocus(draw) {
    const focused = this.footer.contains(document.activeElement) ? document.activeElement.dataset.testid : null;
    draw();
    if (focused) this.footer.querySelector(`[data-testid="${focused}"]`)?.focus({ preventScroll: true });
  }

  #tools(item, place) {
    const copyButton = iconButton('copy', gettext('Copy'), 'copy', () => copyFrom(copyButton, this.#item.text));
    if (item.role === 'user') {
      const editButton = iconButton('pencil', gettext('Edit'), 'edit', () => this.#startEdit());
      // A message without an answer: the page went away before it could ask for one.
      const answer = place.isLast && this.#regenerateButton(gettext('Answer this message'), item.id);
      return [copyButton, editButton, answer];
    }
    return [
      item.text !== '' && copyButton,
      // A failed answer has its Retry button in the error.
      item.state !== 'failed' && this.#regenerateButton(gettext('Regenerate'), item.parent),
    ];
  }

  #regenerateButton(label, message) {
    return iconButton('refresh', label, 'regenerate', () => this.#actions.regenerate(message));
  }

  #branches(item, { siblings }) {
    const position = siblings.indexOf(item.id);
    const step = (iconName, label, testid, target) => {
      const button = iconButton(iconName, label, testid, () => this.#actions.selectBranch(target));
      button.disabled = !target;
      return button;
    };
    const values = { position: formatNumber(position + 1), count: formatNumber(siblings.length) };
    return element(
      'span',
      { class: 'branches', role: 'group', 'aria-label': gettext('Versions') },
      step('chevron-left', gettext('Previous version'), 'branch-previous', siblings[position - 1]),
      element('span', { testid: 'branch-count', 'aria-hidden': 'true' }, `${values.position}/${values.count}`),
      element('span', { class: 'visually-hidden' }, interpolate(gettext('Version %(position)s of %(count)s'), values)),
      step('chevron-right', gettext('Next version'), 'branch-next', siblings[position + 1]),
    );
  }

  #startEdit() {
    const area = element('textarea', {
      testid: 'edit-box',
      dir: 'auto',
      rows: '1',
      'aria-label': gettext('Edit your message'),
    });
    area.value = this.#item.text;
    const error = element('p', { class: 'field-error', role: 'alert' });
    const save = element(
      'button',
      { type: 'submit', class: 'button primary small', testid: 'edit-save' },
      gettext('Send'),
    );
    const cancel = element(
      'button',
      { type: 'button', class: 'button small', testid: 'edit-cancel', on: { click: () => this.#endEdit() } },
      gettext('Cancel'),
    );
    const submit = async () => {
      if (save.disabled) return;
      save.disabled = true;
      area.readOnly = true;
      error.textContent = '';
      try {
        await this.#actions.edit(this.#item.id, area.value);
        this.#endEdit();
      } catch (refusal) {
        error.textContent = errorText(refusal.detail);
        save.disabled = false;
        area.readOnly = false;
      }
    };
    this.#editor = element(
      'form',
      { class: 'edit-form' },
      area,
      error,
      element('div', { class: 'edit-buttons' }, cancel, save),
    );
    this.#editor.addEventListener('submit', (event) => {
      event.preventDefault();
      submit();
    });
    this.#editor.addEventListener('keydown', (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.#endEdit();
      } else if (event.key === 'Enter' && !event.shiftKey && event.target === area) {
        event.preventDefault();
        submit();
      }
    });
    reconcile(this.body, [this.#editor]);
    this.element.toggleAttribute('data-editing', true);
    fitHeight(area);
    area.addEventListener('input', () => fitHeight(area));
    area.focus();
  }

  #endEdit() {
    this.#editor = null;
    this.element.removeAttribute('data-editing');
    this.#drawAround(this.#item, this.#place);
    this.footer.querySelector('[data-testid="edit"]')?.focus();
  }
}

/**
 * As high as its text, within what the style sheet allows.
 * @param {HTMLTextAreaElement} area
 */
export function fitHeight(area) {
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight}px`;
}
