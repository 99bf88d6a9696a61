/** The address of the page: which conversation it shows. */

export class Router {
  #chatUrl;
  #conversationUrl;

  /**
   * @param {{chatUrl: string, conversationUrl: string}} urls
   * @param {(conversation: string | null) => void} onNavigate the user went back or forward
   */
  constructor({ chatUrl, conversationUrl }, onNavigate) {
    this.#chatUrl = chatUrl;
    this.#conversationUrl = conversationUrl;
    window.addEventListener('popstate', () => onNavigate(this.#shownInUrl()));
  }

  /** @param {string | null} conversation */
  urlOf(conversation) {
    return conversation === null ? this.#chatUrl : `${this.#conversationUrl}${conversation}/`;
  }

  /** @param {string | null} conversation */
  push(conversation) {
    if (this.#shownInUrl() !== conversation) history.pushState(null, '', this.urlOf(conversation));
  }

  /** @param {string | null} conversation */
  replace(conversation) {
    history.replaceState(null, '', this.urlOf(conversation));
  }

  #shownInUrl() {
    const { pathname } = window.location;
    if (!pathname.startsWith(this.#conversationUrl)) return null;
    return pathname.slice(this.#conversationUrl.length).replace(/\/$/, '') || null;
  }
}
