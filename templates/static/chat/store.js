/**
 * What the page knows, in one place. The state is changed by `reduce` alone and never in place: what is the same object
 * as before has not changed, so that the parts of the page can tell whether they have to draw themselves again.
 *
 * @typedef {object} Item a message
 * @property {string} id of an answer: also its response's id
 * @property {'user' | 'assistant'} role
 * @property {'draft' | 'streaming' | 'done' | 'stopped' | 'failed'} state
 * @property {string} text
 * @property {string | null} parent
 * @property {string} createdAt
 * @property {Report | null} report
 * @property {'stop' | 'length' | 'cancelled' | null} finishReason
 * @property {import('./errors.js').ErrorDetail | null} error
 * @property {'pending' | 'refused' | 'stored'} sync pending: sent, not confirmed; refused: only this page has it
 * @property {number} sequence the last sequence_number seen of an answer
 *
 * @typedef {object} Report what an answer cost, as the protocol gives it
 * @property {number} prompt_tokens
 * @property {number} cached_tokens
 * @property {number} left_out_messages
 * @property {string} exactness
 * @property {number | null} time_to_first_token
 * @property {number | null} tokens_per_second
 *
 * @typedef {object} Conversation as the protocol gives it
 * @property {string} id
 * @property {string} title
 * @property {string} system_prompt
 * @property {Record<string, any>} sampling
 * @property {string} updated_at
 * @property {number} version
 *
 * @typedef {object} Thread
 * @property {'loading' | 'ready' | 'failed'} status
 * @property {import('./errors.js').ErrorDetail | null} error why it could not be read
 * @property {number} version the conversation's when it was last read
 * @property {Map<string, Item>} items all branches, in order of creation
 * @property {string | null} leaf the last message of the shown branch
 * @property {import('./errors.js').ErrorDetail | null} composerError why the last message was not taken
 *
 * @typedef {object} List
 * @property {string[]} ids
 * @property {string | null} next
 * @property {string} search
 * @property {boolean} isLoaded
 * @property {import('./errors.js').ErrorDetail | null} error why it could not be read
 *
 * @typedef {object} State
 * @property {'connecting' | 'open' | 'lost'} connection
 * @property {Record<string, any> | null} model
 * @property {{message_characters: number, event_bytes: number} | null} limits
 * @property {Map<string, Conversation>} conversations
 * @property {List} list the sidebar's
 * @property {Map<string, Thread>} threads of the conversations that were opened
 * @property {string | null} shown null: the new chat
 * @property {{system_prompt: string, sampling: Record<string, any>}} newChat settings of the chat to be created
 * @property {import('./errors.js').ErrorDetail | null} newChatError
 */

import { isActive, isBelow } from './tree.js';

const NO_SETTINGS = { system_prompt: '', sampling: {} };

/** @returns {List} */
const emptyList = (search) => ({ ids: [], next: null, search, isLoaded: false, error: null });

/** @returns {State} */
export function initialState() {
  return {
    connection: 'connecting',
    model: null,
    limits: null,
    conversations: new Map(),
    list: emptyList(''),
    threads: new Map(),
    shown: null,
    newChat: NO_SETTINGS,
    newChatError: null,
  };
}

/** @returns {Thread} */
const emptyThread = (status) => ({
  status,
  error: null,
  version: 0,
  items: new Map(),
  leaf: null,
  composerError: null,
});

const withEntry = (map, key, value) => new Map(map).set(key, value);

function withoutEntry(map, key) {
  const copy = new Map(map);
  copy.delete(key);
  return copy;
}

/**
 * @param {Record<string, any>} item as the protocol gives it
 * @returns {Item}
 */
export function itemFromServer(item) {
  return {
    id: item.id,
    role: item.role,
    state: item.state,
    text: item.content.map((part) => part.text).join('\n\n'),
    parent: item.previous_item_id,
    createdAt: item.created_at,
    report: item.report ?? null,
    finishReason: item.finish_reason ?? null,
    error: item.error ?? null,
    sync: 'stored',
    sequence: 0,
  };
}

/**
 * What is to be kept when the server tells of an item that is known. The text of an answer in the making comes from its
 * events alone, and an `opened` that was on its way when the answer ended is older than the end.
 *
 * @param {Item | undefined} known
 * @param {Item} told
 */
function mergeItem(known, told) {
  if (!known || known.sync === 'refused' || !isActive(told)) return told;
  if (!isActive(known)) return known;
  return {
    ...told,
    state: known.state === 'streaming' ? 'streaming' : told.state,
    text: known.text,
    report: known.report,
    sequence: known.sequence,
  };
}

/**
 * @param {Thread} thread
 * @param {Item[]} told all items that the server has
 * @param {string | null} leaf
 * @param {number} version
 * @returns {Thread}
 */
function mergeThread(thread, told, leaf, version) {
  const items = new Map(told.map((item) => [item.id, mergeItem(thread.items.get(item.id), item)]));
  for (const item of thread.items.values()) {
    const isOnlyHere = item.sync !== 'stored' && !items.has(item.id);
    if (isOnlyHere && (item.parent === null || items.has(item.parent))) items.set(item.id, item);
  }
  const shown = items.get(thread.leaf);
  const isLeafOnlyHere = shown !== undefined && shown.sync !== 'stored';
  return { ...thread, status: 'ready', error: null, version, items, leaf: isLeafOnlyHere ? thread.leaf : leaf };
}

/**
 * Apply the next event of an answer.
 * @param {Item} item
 * @param {Record<string, any>} event
 * @returns {Item}
 */
function applyStreamEvent(item, event) {
  const next = { ...item, sync: 'stored', sequence: event.sequence_number };
  switch (event.type) {
    case 'response.in_progress':
      return { ...next, state: 'streaming' };
    case 'response.output_text.delta':
      return { ...next, state: 'streaming', text: item.text + event.delta };
    case 'keepwarm.cache_report':
      return { ...next, report: event.report };
    case 'response.done': {
      const [output] = event.response.output;
      if (output) return { ...itemFromServer(output), sequence: event.sequence_number };
      const state = { failed: 'failed', cancelled: 'stopped' }[event.response.status] ?? 'done';
      return { ...next, state };
    }
    default:
      return next;
  }
}

/** @param {Map<string, Conversation>} conversations @param {string[]} ids */
function newestFirst(conversations, ids) {
  const moment = (id) => Date.parse(conversations.get(id).updated_at);
  return [...new Set(ids)].sort((a, b) => moment(b) - moment(a));
}

function receiveConversation(state, conversation) {
  const known = state.conversations.get(conversation.id);
  if (known && known.version > conversation.version) return state;
  const conversations = withEntry(state.conversations, conversation.id, conversation);
  const { list } = state;
  const isListed = list.search === '' || list.ids.includes(conversation.id);
  const ids = isListed ? newestFirst(conversations, [conversation.id, ...list.ids]) : list.ids;
  return { ...state, conversations, list: { ...list, ids } };
}

function receiveList(state, { listed, isNextPage, isRefresh }) {
  const conversations = new Map(state.conversations);
  for (const conversation of listed.conversations) {
    const known = conversations.get(conversation.id);
    if (!known || known.version <= conversation.version) conversations.set(conversation.id, conversation);
  }
  const page = listed.conversations.map(({ id }) => id);
  const list = { ...state.list, error: null };
  if (isNextPage) {
    const ids = newestFirst(conversations, [...list.ids, ...page]);
    return { ...state, conversations, list: { ...list, ids, next: listed.next } };
  }
  const last = listed.conversations.at(-1);
  if (isRefresh && listed.next !== null && list.ids.length > page.length) {
    // The first page again: what was read of older pages stays.
    const older = list.ids.filter((id) => conversations.get(id).updated_at < last.updated_at);
    return { ...state, conversations, list: { ...list, ids: newestFirst(conversations, [...page, ...older]) } };
  }
  return { ...state, conversations, list: { ...list, ids: page, next: listed.next, isLoaded: true } };
}

function removeConversation(state, id) {
  return {
    ...state,
    conversations: withoutEntry(state.conversations, id),
    threads: withoutEntry(state.threads, id),
    list: { ...state.list, ids: state.list.ids.filter((other) => other !== id) },
    shown: state.shown === id ? null : state.shown,
  };
}

/** Remove an item with everything below it. */
function removeItem(thread, id) {
  const removed = thread.items.get(id);
  if (!removed) return thread;
  const items = new Map([...thread.items].filter(([other]) => !isBelow(thread.items, other, id)));
  return { ...thread, items, leaf: items.has(thread.leaf) ? thread.leaf : removed.parent };
}

/** @param {Thread} thread @param {Record<string, any>} action */
function reduceThread(thread, action) {
  switch (action.type) {
    case 'thread/opening':
      return thread.status === 'failed' ? { ...thread, status: 'loading', error: null } : thread;
    case 'thread/open-failed':
      // What is shown already is better than an error in its place.
      return thread.status === 'loading' ? { ...thread, status: 'failed', error: action.error } : thread;
    case 'thread/opened':
      return mergeThread(thread, action.items.map(itemFromServer), action.leaf, action.version);
    case 'item/added': {
      const item = mergeItem(thread.items.get(action.item.id), action.item);
      const leaf = action.isLeaf ? item.id : thread.leaf;
      return { ...thread, items: withEntry(thread.items, item.id, item), leaf, composerError: null };
    }
    case 'item/stream-event': {
      const item = applyStreamEvent(thread.items.get(action.event.response_id), action.event);
      return { ...thread, items: withEntry(thread.items, item.id, item) };
    }
    case 'item/refused': {
      const item = { ...thread.items.get(action.id), state: 'failed', sync: 'refused', error: action.error };
      return { ...thread, items: withEntry(thread.items, item.id, item) };
    }
    case 'item/removed':
      return removeItem(thread, action.id);
    case 'leaf/selected':
      return { ...thread, leaf: action.leaf };
    case 'composer/refused':
      return { ...thread, composerError: action.error };
    default:
      return thread;
  }
}

/**
 * @param {State} state
 * @param {Record<string, any>} action
 * @returns {State}
 */
export function reduce(state, action) {
  switch (action.type) {
    case 'connection/changed':
      return { ...state, connection: action.connection };
    case 'session/created':
      return { ...state, connection: 'open', model: action.session.model, limits: action.session.limits };
    case 'model/changed':
      return { ...state, model: action.model };
    case 'list/search-changed':
      return { ...state, list: emptyList(action.search) };
    case 'list/reading':
      return state.list.error ? { ...state, list: { ...state.list, error: null } } : state;
    case 'list/failed':
      return { ...state, list: { ...state.list, error: action.error } };
    case 'list/received':
      return receiveList(state, action);
    case 'conversation/received':
      return receiveConversation(state, action.conversation);
    case 'conversation/removed':
      return removeConversation(state, action.id);
    case 'conversation/shown':
      return {
        ...state,
        shown: action.id,
        newChatError: null,
        threads:
          action.id === null || state.threads.has(action.id)
            ? state.threads
            : withEntry(state.threads, action.id, emptyThread('loading')),
      };
    case 'conversation/started':
      return {
        ...state,
        shown: action.id,
        newChat: NO_SETTINGS,
        newChatError: null,
        threads: withEntry(state.threads, action.id, emptyThread('ready')),
      };
    case 'new-chat/changed':
      return { ...state, newChat: action.settings };
    case 'new-chat/refused':
      return { ...state, newChatError: action.error };
    default: {
      const thread = state.threads.get(action.conversation);
      if (!thread) return state;
      const changed = reduceThread(thread, action);
      return changed === thread ? state : { ...state, threads: withEntry(state.threads, action.conversation, changed) };
    }
  }
}

/** Keeps the state and tells the parts of the page when to draw, at most once a frame. */
export class Store {
  /** @type {State} */
  state = initialState();
  #drawn = this.state;
  #drawers = [];
  #isScheduled = false;

  /** @param {Record<string, any>} action */
  dispatch(action) {
    const changed = reduce(this.state, action);
    if (changed === this.state) return;
    this.state = changed;
    this.#schedule();
  }

  /** @param {(state: State, drawn: State | null) => void} draw gets the state that was drawn last */
  subscribe(draw) {
    this.#drawers.push(draw);
    draw(this.state, null);
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const draw = () => {
      this.#isScheduled = false;
      const drawn = this.#drawn;
      this.#drawn = this.state;
      for (const drawer of this.#drawers) drawer(this.#drawn, drawn);
    };
    // A hidden tab gets no frames, but its title should still change.
    if (document.hidden) setTimeout(draw, 200);
    else requestAnimationFrame(draw);
  }
}
