/** A block of code: what language it is, its colours, and a button that copies it. */

import hljs from '../vendor/highlight.js/highlight.min.js';
import { copyFrom } from './clipboard.js';
import { element, icon } from './dom.js';
import { gettext } from './i18n.js';

/** Colouring a longer block at every new token would cost more than a frame has. */
const HIGHLIGHT_MAX_CHARACTERS = 20_000;

export class CodeBlock {
  #code = element('code');
  #text = '';
  #language;

  /**
   * @param {string} text
   * @param {string} info what stands behind the opening fence
   */
  constructor(text, info) {
    [this.#language] = info.trim().split(/\s/);
    const copyButton = element(
      'button',
      {
        type: 'button',
        class: 'code-copy',
        testid: 'copy-code',
        on: { click: () => copyFrom(copyButton, this.#text) },
      },
      icon('copy'),
      gettext('Copy code'),
    );
    this.element = element(
      'div',
      { class: 'code-block' },
      element('div', { class: 'code-head' }, element('span', {}, this.#language || gettext('text')), copyButton),
      element('pre', { dir: 'ltr', tabindex: '0' }, this.#code),
    );
    this.update(text);
  }

  /** @param {string} text */
  update(text) {
    this.#text = text;
    if (this.#language && hljs.getLanguage(this.#language) && text.length <= HIGHLIGHT_MAX_CHARACTERS) {
      // highlight.js escapes the code; the only markup in its result are its own spans.
      this.#code.innerHTML = hljs.highlight(text, { language: this.#language, ignoreIllegals: true }).value;
    } else {
      this.#code.textContent = text;
    }
  }
}
