/**
 * Texts that must not get lost before the server has them, kept in the browser for each user and conversation.
 *
 * A draft is what stands in the composer. An outgoing text has been sent and not been confirmed: if the page goes away
 * before the confirmation, the next page finds it here and puts it back into the composer. As long as the page is open
 * it sends the text itself.
 */

import { openPages, thisPage } from './pages.js';
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

/** @returns {{id: string, text: string, page?: string}[]} */
const readOutgoing = (conversation) => read(outgoingKey(conversation)) ?? [];

/**
 * @param {string} conversation
 * @param {string} id the message's
 * @param {string} text
 */
export function rememberOutgoing(conversation, id, text) {
  write(outgoingKey(conversation), [...readOutgoing(conversation), { id, text, page: thisPage }]);
}

/**
 * @param {string} conversation
 * @param {string} id
 */
export function forgetOutgoing(conversation, id) {
  const rest = readOutgoing(conversation).filter((outgoing) => outgoing.id !== id);
  write(outgoingKey(conversation), rest.length ? rest : null);
}

/**
 * Take the texts that a page which is gone sent and the server never got.
 * @param {string} conversation
 * @param {(id: string) => boolean} isKnown whether the server has the message, or this page is still sending it
 */
export async function takeUnsent(conversation, isKnown) {
  const isUnknown = ({ id }) => !isKnown(id);
  if (!readOutgoing(conversation).some(isUnknown)) return '';
  const pages = await openPages();
  const unsent = readOutgoing(conversation).filter((outgoing) => isUnknown(outgoing) && !pages.has(outgoing.page));
  for (const { id } of unsent) forgetOutgoing(conversation, id);
  return unsent.map(({ text }) => text).join('\n\n');
}

/** @param {string} conversation a deleted one */
export function forgetConversation(conversation) {
  write(draftKey(conversation), null);
  write(outgoingKey(conversation), null);
}
