/** What went wrong, in the user's language. The codes are those of docs/protocol.md. */

import { gettext } from './i18n.js';

/**
 * @typedef {object} ErrorDetail
 * @property {string} code
 * @property {string} [message] in English, from the server
 * @property {string | null} [param]
 */

/** An event that the server refused, or that could not be sent. */
export class RequestError extends Error {
  /** @param {ErrorDetail} detail */
  constructor(detail) {
    super(detail.message);
    this.detail = detail;
  }
}

const TEXTS = {
  context_length_exceeded: gettext(
    'This message alone is longer than what the model can read. Shorten it and send it again.',
  ),
  engine_error: gettext('The model ran into an error while it was answering.'),
  event_too_large: gettext('The message is too long to be sent. Shorten it or send it in parts.'),
  empty_message: gettext('The message is empty. Write something first.'),
  id_in_use: gettext('This could not be stored. Reload the page and try again.'),
  internal_error: gettext('Something went wrong on the server. Try again in a moment.'),
  model_unavailable: gettext('The model is not available right now.'),
  not_found: gettext('This is not there any more. It may have been deleted in another window.'),
  not_sent: gettext('This message did not reach the server. Send it again.'),
  prompt_refused: gettext(
    'The model cannot take this conversation in the form it has. A changed system prompt may help.',
  ),
  queue_unavailable: gettext('The answer could not be queued. Try again in a moment.'),
  storage_unavailable: gettext(
    'The server cannot store anything right now. Nothing was changed; try again in a moment.',
  ),
  too_many_responses: gettext('Too many of your answers are still being written. Wait for one of them or stop it.'),
};

/** @param {ErrorDetail | null | undefined} detail */
export function errorText(detail) {
  return TEXTS[detail?.code] ?? (detail?.message || gettext('Something went wrong.'));
}

/**
 * The server's own words, where the text in the user's language says less: numbers, the name of a file.
 * @param {ErrorDetail | null | undefined} detail
 */
export function errorDetails(detail) {
  return detail?.message && detail.message !== errorText(detail) ? detail.message : '';
}
