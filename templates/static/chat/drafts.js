/**
 * Texts that must not get lost before the server has them, kept in the browser for each user and conversation.
 *
 * A draft is what stands in the composer. An outgoing text has been sent and not been confirmed: if the page goes away
 * before the confirmation, the next page finds it here and puts it back into the composer.
 */

import { read, write } from './storage.js';

const NEW_CHAT = 'new';
const prefix = `keepwarm:${document.body.dataset.username}`;
const draftKey = (conversation) => `${prefix}:draft:${conversation ?? NEW_CHAT}`;
const outgoingKey = (conversation) => `${prefix}:outgoing:${conversation}`;

/**
 * @param {string | null} conversation null: the chat that is not created yet
 * @returns {string}
 */
export function readDraft(conversation) {
  return read(draftKey(conversation)) ?? '';
}

/**
 * @param {string | null} conversation
 * @param {string} text
 */
export function writeDraft(conversation, text) {
  write(draftKey(conversation), text === '' ? null : text);
}

/**
 * @param {string} conversation
 * @param {string} id the message's
 * @param {string} text
 */
export function rememberOutgoing(conversation, id, text) {
  write(outgoingKey(conversation), [...(read(outgoingKey(conversation)) ?? []), { id, text }]);
}

/**
 * @param {string} conversation
 * @param {string} id
 */
export function forgetOutgoing(conversation, id) {
  const rest = (read(outgoingKey(conversation)) ?? []).filter((outgoing) => outgoing.id !== id);
  write(outgoingKey(conversation), rest.length ? rest : null);
}

/**
 * Take the texts that an earlier page sent and the server never got.
 * @param {string} conversation
 * @param {(id: string) => boolean} isKnown whether the server has the message, or this page is still sending it
 */
export function takeUnsent(conversation, isKnown) {
  const outgoing = read(outgoingKey(conversation)) ?? [];
  const unsent = outgoing.filter(({ id }) => !isKnown(id));
  for (const { id } of unsent) forgetOutgoing(conversation, id);
  return unsent.map(({ text }) => text).join('\n\n');
}

/** @param {string} conversation a deleted one */
export function forgetConversation(conversation) {
  write(draftKey(conversation), null);
  write(outgoingKey(conversation), null);
}
