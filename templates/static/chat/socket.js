/**
 * The websocket: connects, connects again, and sees to it that what was asked is answered.
 *
 * An event that changes something carries ids that the page chose, so it may be sent twice and is carried out once.
 * Such events stay in the outbox until they are answered and are sent again on every new connection, in their order.
 */

import { RequestError } from './errors.js';
import { gettext } from './i18n.js';
import { newId } from './ids.js';

const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 15_000;
const SILENCE_MS = 20_000;
/** After so long without a word the connection is put to the test, if there is reason to. */
const QUIET_MS = 15_000;
const CHECK_MS = 10_000;
const CLOSED_SIGNED_OUT = 4401;
const CLOSED_TOO_BIG = 1009;

/**
 * @typedef {object} Request
 * @property {Record<string, any>} event
 * @property {boolean} resend whether it is sent again after a lost connection
 * @property {((event: Record<string, any>) => boolean) | null} isAnswer
 * @property {(answer: Record<string, any>) => void} resolve
 * @property {(error: RequestError) => void} reject
 */

/**
 * Events: `ready` (the server has greeted; `detail` is `session.created`), `lost`, `signed-out`, and `event` for every
 * event of the server.
 */
export class Socket extends EventTarget {
  /** @type {Map<string, Request>} by event_id, in the order of sending */
  #requests = new Map();
  #url;
  #webSocket = null;
  #isReady = false;
  #failures = 0;
  #retryTimer = 0;
  #silenceTimer = 0;
  #heardAt = 0;

  /** @param {string} url */
  constructor(url) {
    super();
    this.#url = url;
    window.addEventListener('online', () => this.#onReturn());
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.#onReturn();
    });
  }

  connect() {
    const webSocket = new WebSocket(this.#url);
    this.#webSocket = webSocket;
    webSocket.addEventListener('message', ({ data }) => {
      if (webSocket === this.#webSocket) this.#receive(JSON.parse(data));
    });
    webSocket.addEventListener('close', ({ code }) => {
      if (webSocket === this.#webSocket) this.#closed(code);
    });
  }

  /**
   * Send an event and wait for its answer.
   * @param {Record<string, any>} event
   * @param {object} [options]
   * @param {boolean} [options.resend]
   * @param {((event: Record<string, any>) => boolean) | null} [options.isAnswer] for the events that no reply names,
   *   only errors do: their answer may be a long time in coming
   * @returns {Promise<Record<string, any>>} rejects with a RequestError
   */
  request(event, { resend = true, isAnswer = null } = {}) {
    return new Promise((resolve, reject) => {
      const request = { event: { ...event, event_id: newId() }, resend, isAnswer, resolve, reject };
      if (!this.#isReady && !resend) {
        reject(lostConnection());
        return;
      }
      this.#requests.set(request.event.event_id, request);
      if (this.#isReady) this.#send(request);
    });
  }

  #send(request) {
    this.#webSocket.send(JSON.stringify(request.event));
    // A network that was switched off swallows frames without a word. Silence after a question means it is gone.
    if (!request.isAnswer) this.#expectWord(SILENCE_MS);
  }

  #expectWord(milliseconds) {
    this.#silenceTimer ||= setTimeout(() => this.#closed(null), milliseconds);
  }

  /** See to it that a dead connection is noticed; it may look open for many minutes. Costs nothing on a busy one. */
  check() {
    if (!this.#isReady || this.#silenceTimer || Date.now() - this.#heardAt < QUIET_MS) return;
    this.#expectWord(CHECK_MS);
    // Any answer will do; this one is small. When none comes, the connection is replaced.
    this.request({ type: 'keepwarm.conversation.list', limit: 1 }, { resend: false }).catch(() => {});
  }

  #receive(event) {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = 0;
    this.#heardAt = Date.now();
    if (event.type === 'session.created') {
      this.#isReady = true;
      this.#failures = 0;
      for (const request of this.#requests.values()) this.#send(request);
      this.dispatchEvent(new CustomEvent('ready', { detail: event }));
      return;
    }
    this.dispatchEvent(new CustomEvent('event', { detail: event }));
    const named = event.type === 'error' ? event.error.event_id : event.in_reply_to;
    for (const [id, request] of this.#requests) {
      if (id !== named && !request.isAnswer?.(event)) continue;
      this.#requests.delete(id);
      if (event.type === 'error') request.reject(new RequestError(event.error));
      else request.resolve(event);
    }
  }

  #closed(code) {
    const webSocket = this.#webSocket;
    this.#webSocket = null;
    this.#isReady = false;
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = 0;
    webSocket.close();
    if (code === CLOSED_SIGNED_OUT) {
      this.dispatchEvent(new Event('signed-out'));
      return;
    }
    for (const [id, request] of this.#requests) {
      // A frame that was too big would close the next connection as well.
      const isTooBig = code === CLOSED_TOO_BIG;
      if (request.resend && !isTooBig) continue;
      this.#requests.delete(id);
      request.reject(isTooBig ? tooLarge() : lostConnection());
    }
    this.dispatchEvent(new Event('lost'));
    const delay = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#failures);
    this.#failures += 1;
    // Jitter: a restarted server is not met by all its pages at the same moment.
    this.#retryTimer = setTimeout(() => this.connect(), delay * (0.5 + Math.random() / 2));
  }

  /** The network or the user is back: no need to wait out the delay, and reason to doubt a quiet connection. */
  #onReturn() {
    if (this.#webSocket !== null) {
      this.check();
      return;
    }
    clearTimeout(this.#retryTimer);
    this.connect();
  }
}

function lostConnection() {
  return new RequestError({ code: 'connection_lost', message: gettext('The connection was lost.') });
}

function tooLarge() {
  return new RequestError({ code: 'event_too_large', message: 'The frame was too large.' });
}
