/** What the user can do with conversations and messages. Shown at once where that is safe, confirmed by the server. */

import { announce } from './announce.js';
import { forgetConversation, forgetOutgoing, readDraft, rememberOutgoing, writeDraft } from './drafts.js';
import { RequestError } from './errors.js';
import { formatNumber, gettext, interpolate } from './i18n.js';
import { newId } from './ids.js';
import { branchTo, isActive, isBelow } from './tree.js';

/** @param {string} text */
const userItem = (id, text) => ({ id, type: 'message', role: 'user', content: [{ type: 'input_text', text }] });

/** @returns {import('./store.js').Item} */
const pendingItem = (id, role, parent, text = '') => ({
  id,
  role,
  state: role === 'user' ? 'done' : 'draft',
  text,
  parent,
  createdAt: new Date().toISOString(),
  report: null,
  error: null,
  sync: 'pending',
  sequence: 0,
});

export class Actions {
  #store;
  #socket;
  #router;
  /** Set by the composer: called when a text comes back to it. */
  onTextReturned = (_conversation) => {};

  /**
   * @param {import('./store.js').Store} store
   * @param {import('./socket.js').Socket} socket
   * @param {import('./router.js').Router} router
   */
  constructor(store, socket, router) {
    this.#store = store;
    this.#socket = socket;
    this.#router = router;
  }

  /**
   * Send a message and ask for its answer; in a new chat also create the conversation.
   * @param {string} text
   * @returns {boolean} whether the composer may let go of the text
   */
  send(text) {
    const { shown, limits } = this.#store.state;
    const error = checkLength(text, limits);
    if (error) {
      this.#refuse(shown, error);
      return false;
    }
    const conversation = shown ?? newId();
    const created = shown === null ? this.#createConversation(conversation) : Promise.resolve();
    const { items, leaf } = this.#store.state.threads.get(conversation);
    // An answer that the server never took is on this page alone: nothing can follow it there.
    const previous = branchTo(items, leaf).findLast((item) => item.sync !== 'refused')?.id ?? null;
    const message = newId();
    const answer = newId();
    this.#add(conversation, pendingItem(message, 'user', previous, text), { isLeaf: true });
    this.#add(conversation, pendingItem(answer, 'assistant', message), { isLeaf: true });
    rememberOutgoing(conversation, message, text);

    const added = this.#socket.request({
      type: 'conversation.item.create',
      conversation,
      item: userItem(message, text),
      ...(previous === null ? {} : { previous_item_id: previous }),
    });
    this.#requestAnswer(conversation, message, answer, added);
    this.#settleMessage(conversation, { message, text, created, added });
    return true;
  }

  #createConversation(id) {
    const { newChat } = this.#store.state;
    this.#store.dispatch({ type: 'conversation/started', id });
    this.#router.push(id);
    return this.#socket.request({ type: 'keepwarm.conversation.create', id, ...newChat }).catch((error) => {
      // What was set for the new chat is kept: it may be what was refused.
      this.#store.dispatch({ type: 'new-chat/changed', settings: newChat });
      throw error;
    });
  }

  /** Give a message that was not taken back to the composer. */
  async #settleMessage(conversation, { message, text, created, added }) {
    const [creation, addition] = await Promise.allSettled([created, added]);
    if (addition.status === 'fulfilled') return;
    this.#store.dispatch({ type: 'item/removed', conversation, id: message });
    forgetOutgoing(conversation, message);
    if (creation.status === 'rejected') {
      const wasShown = this.#store.state.shown === conversation;
      this.#store.dispatch({ type: 'conversation/removed', id: conversation });
      if (wasShown) this.#router.replace(null);
      this.returnText(null, readDraft(conversation));
      forgetConversation(conversation);
    }
    const place = this.#store.state.threads.has(conversation) ? conversation : null;
    this.returnText(place, text);
    const failure = creation.status === 'rejected' ? creation : addition;
    this.#refuse(place, failure.reason.detail);
  }

  /** Put a text before what stands in a composer now. */
  returnText(conversation, text) {
    const texts = [text, readDraft(conversation)].filter((part) => part !== '');
    writeDraft(conversation, texts.join('\n\n'));
    this.onTextReturned(conversation);
  }

  #refuse(conversation, error) {
    this.#store.dispatch(
      conversation === null ? { type: 'new-chat/refused', error } : { type: 'composer/refused', conversation, error },
    );
  }

  #add(conversation, item, { isLeaf = false } = {}) {
    this.#store.dispatch({ type: 'item/added', conversation, item, isLeaf });
  }

  /**
   * @param {string} conversation
   * @param {string} message the user message to be answered
   * @param {string} answer the answer's id
   * @param {Promise<unknown>} [stored] of the message; when it fails there is nothing to answer
   */
  async #requestAnswer(conversation, message, answer, stored = Promise.resolve()) {
    const created = this.#socket.request({
      type: 'response.create',
      conversation,
      previous_item_id: message,
      response_id: answer,
    });
    const [storing, creation] = await Promise.allSettled([stored, created]);
    if (storing.status === 'rejected' || creation.status === 'fulfilled') return;
    this.#store.dispatch({ type: 'item/refused', conversation, id: answer, error: creation.reason.detail });
  }

  /**
   * Answer a user message once more, on a branch of its own.
   * @param {string} message
   */
  regenerate(message) {
    const { shown: conversation, threads } = this.#store.state;
    const { items, leaf } = threads.get(conversation);
    const shownAnswer = branchTo(items, leaf).find((item) => item.parent === message);
    this.#cancelBelow(conversation, message);
    if (shownAnswer?.sync === 'refused') {
      this.#store.dispatch({ type: 'item/removed', conversation, id: shownAnswer.id });
    }
    const answer = newId();
    this.#add(conversation, pendingItem(answer, 'assistant', message), { isLeaf: true });
    this.#requestAnswer(conversation, message, answer);
  }

  /**
   * Send a new wording of a user message, and ask for its answer.
   * @param {string} message
   * @param {string} text
   * @returns {Promise<void>} rejects with a RequestError when the server did not take it
   */
  async edit(message, text) {
    const { shown: conversation, limits } = this.#store.state;
    const error = checkLength(text, limits);
    if (error) throw new RequestError(error);
    const wording = newId();
    const answer = newId();
    const added = this.#socket.request({
      type: 'keepwarm.edit',
      conversation,
      item_id: message,
      item: userItem(wording, text),
    });
    this.#requestAnswer(conversation, wording, answer, added);
    await added;
    // The user may have gone to another conversation meanwhile, or deleted this one.
    this.#cancelBelow(conversation, message);
    this.#add(conversation, pendingItem(answer, 'assistant', wording), { isLeaf: true });
  }

  /** Stop what is being written below a message that the user has just turned away from; others would wait for it. */
  #cancelBelow(conversation, message) {
    const items = this.#store.state.threads.get(conversation)?.items ?? new Map();
    for (const item of items.values()) {
      if (isActive(item) && isBelow(items, item.id, message)) this.#cancel(item.id);
    }
  }

  /** Stop the answer that is being written: the first one of the shown branch that has not ended. */
  stop() {
    const { shown, threads } = this.#store.state;
    const thread = threads.get(shown);
    if (!thread) return;
    const active = branchTo(thread.items, thread.leaf).find(isActive) ?? [...thread.items.values()].find(isActive);
    if (active) this.#cancel(active.id);
  }

  async #cancel(response) {
    const isAnswer = (event) => event.type === 'response.done' && event.response_id === response;
    try {
      await this.#socket.request({ type: 'response.cancel', response_id: response }, { isAnswer });
    } catch {
      // It has ended meanwhile; its response.done is on the way.
    }
  }

  /**
   * Show the branch through a message.
   * @param {string} id
   */
  async selectBranch(id) {
    const { shown: conversation, threads } = this.#store.state;
    if (threads.get(conversation).items.get(id)?.sync !== 'stored') {
      this.#store.dispatch({ type: 'leaf/selected', conversation, leaf: id });
      return;
    }
    try {
      await this.#socket.request({ type: 'keepwarm.branch', conversation, item_id: id });
    } catch ({ detail }) {
      this.#refuse(conversation, detail);
    }
  }

  /**
   * @param {string} conversation
   * @param {{title?: string, system_prompt?: string, sampling?: Record<string, any>}} changes
   */
  async update(conversation, changes) {
    await this.#socket.request({ type: 'keepwarm.conversation.update', conversation, ...changes });
  }

  /** @param {string} conversation */
  async delete(conversation) {
    await this.#socket.request({ type: 'keepwarm.conversation.delete', conversation });
    announce(gettext('The conversation is deleted.'));
  }
}

/**
 * Find out here what the server would refuse anyway: a frame far above its limit closes the connection.
 * @param {string} text
 * @param {import('./store.js').State['limits']} limits
 */
function checkLength(text, limits) {
  if (!limits) return null;
  const characters = [...text].length;
  const bytes = new Blob([JSON.stringify(text)]).size;
  if (characters <= limits.message_characters)
    return bytes + 1024 <= limits.event_bytes ? null : { code: 'event_too_large' };
  const message = interpolate(
    gettext('The message has %(characters)s characters; at most %(limit)s are taken. Shorten it or send it in parts.'),
    { characters: formatNumber(characters), limit: formatNumber(limits.message_characters) },
  );
  return { code: 'message_too_long', message };
}
