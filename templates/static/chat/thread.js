/** The messages of the shown branch, and where the reader is in them. */

import { announce } from './announce.js';
import { byTestId, element, reconcile } from './dom.js';
import { errorBox } from './error_box.js';
import { errorText } from './errors.js';
import { gettext } from './i18n.js';
import { MessageView } from './message.js';
import { branchTo, isActive, siblings } from './tree.js';

/** This near to the end counts as being there. */
const END_PX = 60;

/**
 * Keeps the end in sight while the thread grows, until the reader scrolls up.
 */
class EndFollower {
  #scroller;
  #jump;
  #isFollowing = true;
  #lastTop = 0;

  /**
   * @param {HTMLElement} scroller
   * @param {HTMLElement} content
   * @param {HTMLElement} jump the button that leads to the end
   */
  constructor(scroller, content, jump) {
    this.#scroller = scroller;
    this.#jump = jump;
    scroller.addEventListener('scroll', () => this.#onScroll(), { passive: true });
    new ResizeObserver(() => this.#onResize()).observe(content);
    new ResizeObserver(() => this.#onResize()).observe(scroller);
    jump.addEventListener('click', () => {
      const isCalm = window.matchMedia('(prefers-reduced-motion: reduce)').matches;
      this.#isFollowing = true;
      scroller.scrollTo({ top: scroller.scrollHeight, behavior: isCalm ? 'auto' : 'smooth' });
    });
  }

  /** Go to the end and stay there. */
  follow() {
    this.#isFollowing = true;
    this.#onResize();
  }

  get #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < END_PX;
  }

  #onScroll() {
    const { scrollTop } = this.#scroller;
    // Only a move upwards is the reader's: a thread that grew since our own move looks scrolled as well.
    if (scrollTop < this.#lastTop) this.#isFollowing = this.#isAtEnd;
    else if (this.#isAtEnd) this.#isFollowing = true;
    this.#lastTop = scrollTop;
    this.#jump.hidden = this.#isAtEnd || this.#isFollowing;
  }

  #onResize() {
    if (this.#isFollowing) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#jump.hidden = this.#isAtEnd || this.#isFollowing;
  }
}

/** What an answer without text waits for. */
function waitingText(item, firstActive, { connection, model }) {
  if (item.sync === 'pending' && connection === 'lost') return gettext('Waiting for the connection…');
  if (item !== firstActive) return gettext('Waiting for the answer before this one…');
  if (model && model.state !== 'ready') return gettext('Waiting for the model…');
  return gettext('Thinking…');
}

/** Tell screen readers how the shown answers end. */
function announceEnds(items, drawnItems) {
  for (const item of items.values()) {
    const before = drawnItems.get(item.id);
    if (!before || !isActive(before) || isActive(item)) continue;
    if (item.state === 'done') announce(gettext('Answer complete'));
    else if (item.state === 'stopped') announce(gettext('Answer stopped'));
    else announce(errorText(item.error));
  }
}

/**
 * @param {import('./store.js').Store} store
 * @param {{actions: import('./actions.js').Actions, sync: import('./sync.js').Sync}} context
 */
export function startThread(store, { actions, sync }) {
  const list = document.getElementById('messages');
  const emptyState = byTestId('empty-state');
  const loading = element('p', { class: 'thread-loading' }, gettext('Loading the conversation…'));
  const follower = new EndFollower(document.getElementById('thread-scroller'), list, byTestId('jump'));
  /** @type {Map<string, MessageView>} of the shown conversation */
  let views = new Map();
  let drawnConversation = null;

  function drawMessages(thread, state) {
    const branch = branchTo(thread.items, thread.leaf);
    const firstActive = [...thread.items.values()].find(isActive);
    const nodes = branch.map((item, index) => {
      let view = views.get(item.id);
      if (!view) {
        view = new MessageView(item, actions);
        views.set(item.id, view);
      }
      view.update(item, {
        siblings: siblings(thread.items, item).map(({ id }) => id),
        isLast: index === branch.length - 1,
        waiting: isActive(item) ? waitingText(item, firstActive, state) : '',
      });
      return view.element;
    });
    reconcile(list, nodes);
  }

  function drawFailure(error, drawnError) {
    if (error === drawnError) return;
    reconcile(list, [errorBox(error, 'thread-error', () => sync.open(store.state.shown))]);
    announce(errorText(error));
  }

  store.subscribe((state, drawn) => {
    const thread = state.threads.get(state.shown);
    const drawnThread = drawn?.threads.get(drawn.shown);
    const isSame =
      drawn &&
      thread === drawnThread &&
      state.shown === drawn.shown &&
      state.model === drawn.model &&
      state.connection === drawn.connection;
    if (isSame) return;

    const isOther = state.shown !== drawnConversation;
    if (isOther) {
      views = new Map();
      drawnConversation = state.shown;
    }
    const isEmpty = state.shown === null || (thread.status === 'ready' && thread.items.size === 0);
    emptyState.hidden = !isEmpty;
    if (!thread) reconcile(list, []);
    else if (thread.status === 'loading') reconcile(list, [loading]);
    else if (thread.status === 'failed') drawFailure(thread.error, drawnThread?.error);
    else drawMessages(thread, state);

    if (thread && drawnThread && !isOther) announceEnds(thread.items, drawnThread.items);
    const isSentHere = thread?.leaf !== drawnThread?.leaf && thread?.items.get(thread.leaf)?.sync === 'pending';
    if (isOther || isSentHere) follower.follow();
  });
}
