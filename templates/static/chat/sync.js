/** Keeps the store what the server has: applies its events, reads again what changed, resumes answers. */

import { forgetConversation, forgetOutgoing, takeUnsent } from './drafts.js';
import { itemFromServer } from './store.js';
import { isActive, isAnswering } from './tree.js';

const PAGE_SIZE = 40;
/** Changes come in bursts (a message, its answer's begin): one reading serves them all. */
const REREAD_DELAY_MS = 250;
const CHECK_MS = 5_000;

const STREAM_EVENTS = new Set([
  'response.in_progress',
  'response.output_text.delta',
  'keepwarm.cache_report',
  'response.done',
]);

export class Sync {
  #store;
  #socket;
  #handlers;
  /** Answers whose events come on this connection. */
  #followed = new Set();
  /** Answers that wait for a resume to fill a gap. */
  #resuming = new Set();
  /** Answers whose events are gone: asking again would not help. */
  #unresumable = new Set();
  #rereadTimers = new Map();
  #listTimer = 0;
  #isReadingPage = false;

  /**
   * @param {import('./store.js').Store} store
   * @param {import('./socket.js').Socket} socket
   * @param {object} handlers what is not a matter of state alone
   * @param {(conversation: string, text: string) => void} handlers.onUnsent an earlier page's text did not arrive
   * @param {(conversation: string, unsent: string) => void} handlers.onMissing there is no such conversation
   * @param {(conversation: string) => void} handlers.onDeleted
   */
  constructor(store, socket, handlers) {
    this.#store = store;
    this.#socket = socket;
    this.#handlers = handlers;
    socket.addEventListener('ready', ({ detail }) => this.#onReady(detail));
    socket.addEventListener('lost', () => store.dispatch({ type: 'connection/changed', connection: 'lost' }));
    socket.addEventListener('event', ({ detail }) => this.#onEvent(detail));
    // An answer may be slow in coming, or the connection may be dead.
    setInterval(() => {
      if ([...store.state.threads.values()].some(({ items }) => isAnswering(items))) socket.check();
    }, CHECK_MS);
  }

  #onReady(session) {
    this.#followed.clear();
    this.#resuming.clear();
    this.#unresumable.clear();
    this.#isReadingPage = false;
    this.#store.dispatch({ type: 'session/created', session });
    this.readList();
    const { shown, threads } = this.#store.state;
    for (const [id, thread] of threads) {
      if (id === shown || isAnswering(thread.items)) this.open(id);
    }
  }

  /** Read the sidebar's first page. */
  async readList({ isRefresh = false } = {}) {
    this.#store.dispatch({ type: 'list/reading' });
    await this.#readPage({}, { isRefresh });
  }

  async readNextPage() {
    const { next } = this.#store.state.list;
    if (next === null || this.#isReadingPage) return;
    this.#isReadingPage = true;
    await this.#readPage({ before: next }, { isNextPage: true });
    this.#isReadingPage = false;
  }

  async #readPage(place, kind) {
    const { search } = this.#store.state.list;
    const event = { type: 'keepwarm.conversation.list', search, limit: PAGE_SIZE, ...place };
    const action = await this.#socket.request(event, { resend: false }).then(
      (listed) => ({ type: 'list/received', listed, ...kind }),
      ({ detail }) => ({ type: 'list/failed', error: detail }),
    );
    // After a lost connection everything is read anew.
    if (action.error?.code === 'connection_lost' || this.#store.state.list.search !== search) return;
    this.#store.dispatch(action);
  }

  /** @param {string} search */
  search(search) {
    this.#store.dispatch({ type: 'list/search-changed', search });
    this.readList();
  }

  /** Read a conversation with all its messages. */
  async open(id) {
    this.#store.dispatch({ type: 'thread/opening', conversation: id });
    try {
      await this.#socket.request({ type: 'keepwarm.conversation.open', conversation: id }, { resend: false });
    } catch ({ detail }) {
      // After a lost connection everything is read anew.
      if (detail.code === 'connection_lost') return;
      if (detail.code === 'not_found') this.#onMissing(id);
      else this.#store.dispatch({ type: 'thread/open-failed', conversation: id, error: detail });
    }
  }

  async #onMissing(id) {
    // A chat whose creation is still in the outbox is not missing: it has a message that waits.
    const items = this.#store.state.threads.get(id)?.items ?? new Map();
    if ([...items.values()].some((item) => item.sync === 'pending')) return;
    const unsent = await this.#takeUnsent(id);
    this.#store.dispatch({ type: 'conversation/removed', id });
    this.#handlers.onMissing(id, unsent);
  }

  #onEvent(event) {
    const dispatch = (action) => this.#store.dispatch(action);
    if (STREAM_EVENTS.has(event.type)) {
      this.#onStreamEvent(event);
      return;
    }
    switch (event.type) {
      case 'keepwarm.model':
        dispatch({ type: 'model/changed', model: event.model });
        break;
      case 'keepwarm.conversation.created':
      case 'keepwarm.conversation.updated':
        dispatch({ type: 'conversation/received', conversation: event.conversation });
        break;
      case 'keepwarm.conversation.opened':
        this.#onOpened(event);
        break;
      case 'keepwarm.conversation.deleted':
        forgetConversation(event.conversation);
        if (this.#store.state.shown === event.conversation) this.#handlers.onDeleted(event.conversation);
        dispatch({ type: 'conversation/removed', id: event.conversation });
        break;
      case 'keepwarm.conversation.changed':
        this.#onChanged(event);
        break;
      case 'conversation.item.added':
        forgetOutgoing(event.conversation, event.item.id);
        dispatch({ type: 'item/added', conversation: event.conversation, item: itemFromServer(event.item) });
        break;
      case 'keepwarm.branch.selected':
        dispatch({ type: 'leaf/selected', conversation: event.conversation, leaf: event.leaf });
        break;
      case 'response.created': {
        const { id, conversation, output } = event.response;
        this.#followed.add(id);
        if (output.length) dispatch({ type: 'item/added', conversation, item: itemFromServer(output[0]) });
        break;
      }
      default:
        break;
    }
  }

  #onOpened({ conversation, items, leaf }) {
    this.#store.dispatch({ type: 'conversation/received', conversation });
    const { id, version } = conversation;
    this.#store.dispatch({ type: 'thread/opened', conversation: id, version, items, leaf });
    this.#returnUnsent(id);
    for (const item of this.#store.state.threads.get(id)?.items.values() ?? []) {
      if (isActive(item) && item.sync === 'stored' && !this.#followed.has(item.id)) this.#resume(item);
    }
  }

  /** What a page that is gone sent from here and the server never got. */
  #takeUnsent(id) {
    return takeUnsent(id, (item) => this.#store.state.threads.get(id)?.items.has(item) ?? false);
  }

  async #returnUnsent(id) {
    const unsent = await this.#takeUnsent(id);
    if (unsent) this.#handlers.onUnsent(id, unsent);
  }

  #onChanged({ conversation: id, version }) {
    const { conversations, threads, shown } = this.#store.state;
    const known = id === shown ? threads.get(id)?.version : conversations.get(id)?.version;
    if (version <= known) return;
    clearTimeout(this.#listTimer);
    this.#listTimer = setTimeout(() => this.readList({ isRefresh: true }), REREAD_DELAY_MS);
    if (id !== shown) return;
    clearTimeout(this.#rereadTimers.get(id));
    this.#rereadTimers.set(
      id,
      setTimeout(() => {
        this.#rereadTimers.delete(id);
        if (this.#store.state.shown === id) this.open(id);
      }, REREAD_DELAY_MS),
    );
  }

  /** Apply an answer's event if it is the next one; the numbers tell. */
  #onStreamEvent(event) {
    const { response_id: id, sequence_number: number } = event;
    for (const [conversation, thread] of this.#store.state.threads) {
      const item = thread.items.get(id);
      if (!item) continue;
      if (!isActive(item) || number <= item.sequence) return;
      if (number > item.sequence + 1) {
        if (!this.#resuming.has(id)) this.#resume(item);
        return;
      }
      this.#resuming.delete(id);
      this.#store.dispatch({ type: 'item/stream-event', conversation, event });
      return;
    }
  }

  async #resume({ id, sequence }) {
    if (this.#unresumable.has(id)) return;
    this.#followed.add(id);
    this.#resuming.add(id);
    try {
      const event = { type: 'keepwarm.resume', response_id: id, sequence_number: sequence };
      const isAnswer = (answer) => answer.response_id === id;
      await this.#socket.request(event, { resend: false, isAnswer });
    } catch ({ detail }) {
      if (detail.code === 'connection_lost') return;
      // Its events are no longer kept, so it has ended: the conversation has the whole text.
      this.#unresumable.add(id);
      const { threads } = this.#store.state;
      for (const [conversation, thread] of threads) {
        if (thread.items.has(id)) this.open(conversation);
      }
    }
  }
}
