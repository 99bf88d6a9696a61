/** The list of conversations: search, date groups, rename and delete. */

import { announce } from './announce.js';
import { confirmAction } from './confirm.js';
import { dateGroup } from './dates.js';
import { byTestId, element, icon, iconButton, reconcile } from './dom.js';
import { errorBox } from './error_box.js';
import { errorText } from './errors.js';
import { gettext, interpolate } from './i18n.js';
import { attachMenu } from './menu.js';
import { isAnswering } from './tree.js';

const SEARCH_DELAY_MS = 250;
const TITLE_MAX_LENGTH = 200;
/** Rows move to another group when the day ends. */
const REGROUP_MS = 60_000;

/** @param {import('./store.js').Conversation | undefined} conversation */
export function titleOf(conversation) {
  return conversation?.title || gettext('New chat');
}

class Row {
  #conversation = null;
  #actions;
  #editor = null;

  /**
   * @param {string} id
   * @param {{actions: import('./actions.js').Actions, url: string, onOpen: (id: string) => void}} context
   */
  constructor(id, { actions, url, onOpen }) {
    this.id = id;
    this.#actions = actions;
    this.title = element('span', { class: 'row-title', dir: 'auto' });
    this.link = element('a', { class: 'row-link', href: url }, this.title);
    this.link.addEventListener('click', (event) => {
      // Ctrl, Shift and the middle button open tabs and windows, as with every link.
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault();
      onOpen(id);
    });
    this.menuButton = iconButton('dots', '', 'row-menu', () => {});
    this.menu = element(
      'div',
      { class: 'menu', role: 'menu' },
      this.#menuItem('pencil', gettext('Rename'), 'rename', () => this.#startRename()),
      this.#menuItem('trash', gettext('Delete'), 'delete', () => this.#delete()),
    );
    attachMenu(this.menuButton, this.menu);
    this.error = element('p', { class: 'field-error', role: 'alert' });
    this.element = element(
      'li',
      { class: 'row', testid: 'conversation-row', 'data-id': id },
      this.link,
      this.menuButton,
      this.menu,
      this.error,
    );
  }

  #menuItem(iconName, label, testid, onClick) {
    const run = () => {
      this.menu.hidePopover();
      onClick();
    };
    return element('button', { type: 'button', role: 'menuitem', testid, on: { click: run } }, icon(iconName), label);
  }

  update(conversation, isShown, isAnswering) {
    this.element.toggleAttribute('data-answering', isAnswering);
    if (isShown) this.link.setAttribute('aria-current', 'page');
    else this.link.removeAttribute('aria-current');
    if (conversation === this.#conversation) return;
    this.#conversation = conversation;
    const title = titleOf(conversation);
    this.title.textContent = title;
    this.link.title = title;
    const label = interpolate(gettext('Options for “%(title)s”'), { title });
    this.menuButton.setAttribute('aria-label', label);
    this.menuButton.title = gettext('Options');
  }

  #startRename() {
    const input = element('input', {
      class: 'rename-box',
      testid: 'rename-box',
      maxlength: TITLE_MAX_LENGTH,
      dir: 'auto',
      'aria-label': gettext('New title'),
    });
    input.value = this.#conversation.title;
    this.#editor = input;
    this.link.hidden = true;
    this.menuButton.hidden = true;
    this.element.prepend(input);
    input.focus();
    input.select();
    input.addEventListener('blur', () => this.#endRename(input.value));
    input.addEventListener('keydown', (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.#endRename('');
        this.link.focus();
      } else if (event.key === 'Enter') {
        event.preventDefault();
        this.#endRename(input.value);
        this.link.focus();
      }
    });
  }

  async #endRename(text) {
    // Removing the box takes the focus from it, which ends the renaming a second time.
    const editor = this.#editor;
    if (!editor) return;
    this.#editor = null;
    editor.remove();
    this.link.hidden = false;
    this.menuButton.hidden = false;
    const title = text.trim();
    if (title === '' || title === this.#conversation.title) return;
    this.title.textContent = title;
    await this.#attempt(() => this.#actions.update(this.id, { title }));
  }

  async #delete() {
    const isConfirmed = await confirmAction({
      title: gettext('Delete this conversation?'),
      text: interpolate(gettext('“%(title)s” and all its messages will be gone for good.'), {
        title: titleOf(this.#conversation),
      }),
      action: gettext('Delete'),
      testid: 'confirm-delete',
    });
    if (isConfirmed) await this.#attempt(() => this.#actions.delete(this.id));
  }

  async #attempt(change) {
    this.error.textContent = '';
    try {
      await change();
    } catch ({ detail }) {
      this.title.textContent = titleOf(this.#conversation);
      this.error.textContent = errorText(detail);
    }
  }
}

/** @param {import('./store.js').State} state */
function answeringIds({ threads }) {
  return [...threads].filter(([, { items }]) => isAnswering(items)).map(([id]) => id);
}

/**
 * @param {import('./store.js').Store} store
 * @param {{actions: import('./actions.js').Actions, sync: import('./sync.js').Sync,
 *   router: import('./router.js').Router, onOpen: (id: string) => void}} context
 */
export function startSidebar(store, { actions, sync, router, onOpen }) {
  const list = document.getElementById('conversations');
  const search = byTestId('search');
  const note = element('p', { class: 'list-note' });
  const failure = element('div', { class: 'list-failure' });
  let drawnError = null;
  const end = element('div', { class: 'list-end' });
  /** @type {Map<string, Row>} */
  const rows = new Map();
  /** @type {Map<string, {heading: HTMLElement, list: HTMLElement, element: HTMLElement}>} */
  const groups = new Map();

  function group(name) {
    if (!groups.has(name)) {
      const id = `group-${groups.size}`;
      const heading = element('h2', { id }, name);
      const rowList = element('ul', { 'aria-labelledby': id });
      groups.set(name, { list: rowList, element: element('section', {}, heading, rowList) });
    }
    return groups.get(name);
  }

  function row(id) {
    if (!rows.has(id)) rows.set(id, new Row(id, { actions, url: router.urlOf(id), onOpen }));
    return rows.get(id);
  }

  function noteText({ isLoaded, search: text, ids, error }, connection) {
    if (ids.length || error) return '';
    if (!isLoaded) return connection === 'lost' ? '' : gettext('Loading…');
    return text ? gettext('Nothing found.') : gettext('Your conversations will appear here.');
  }

  function drawFailure(error) {
    if (error === drawnError) return;
    drawnError = error;
    failure.replaceChildren(...(error ? [errorBox(error, 'list-error', () => sync.readList())] : []));
    if (error) announce(errorText(error));
  }

  const observer = new IntersectionObserver(
    ([{ isIntersecting }]) => {
      if (isIntersecting) sync.readNextPage();
    },
    { root: list, rootMargin: '200px' },
  );

  function draw(state) {
    const now = new Date();
    const answering = new Set(answeringIds(state));
    /** @type {Map<string, Node[]>} */
    const grouped = new Map();
    for (const id of state.list.ids) {
      const conversation = state.conversations.get(id);
      const view = row(id);
      view.update(conversation, id === state.shown, answering.has(id));
      const name = dateGroup(new Date(conversation.updated_at), now);
      grouped.set(name, [...(grouped.get(name) ?? []), view.element]);
    }
    for (const id of [...rows.keys()]) {
      if (!state.conversations.has(id)) rows.delete(id);
    }
    note.textContent = noteText(state.list, state.connection);
    const sections = [...grouped].map(([name, nodes]) => {
      const { list: rowList, element: section } = group(name);
      reconcile(rowList, nodes);
      return section;
    });
    drawFailure(state.list.error);
    // After a failure the next page is not asked for again and again.
    end.hidden = state.list.next === null || state.list.error !== null;
    reconcile(list, [...sections, note, failure, end]);
    // Observing anew tells again whether the end is in sight: a page may have been too short to move it out.
    observer.unobserve(end);
    observer.observe(end);
  }

  let timer = 0;
  search.addEventListener('input', () => {
    clearTimeout(timer);
    timer = setTimeout(() => sync.search(search.value.trim()), SEARCH_DELAY_MS);
  });
  search.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || event.isComposing) return;
    // It empties the field, and does not stop an answer as it does elsewhere.
    event.stopPropagation();
    search.value = '';
    search.dispatchEvent(new Event('input'));
  });
  setInterval(() => draw(store.state), REGROUP_MS);

  store.subscribe((state, drawn) => {
    const isSame =
      drawn &&
      state.list === drawn.list &&
      state.conversations === drawn.conversations &&
      state.shown === drawn.shown &&
      state.connection === drawn.connection &&
      answeringIds(state).join() === answeringIds(drawn).join();
    if (!isSame) draw(state);
  });
}
