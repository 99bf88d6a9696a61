/**
 * An answer's markdown as DOM. While it streams, only the blocks that changed are drawn again, so that selected text
 * and scrolled code above stay as they are.
 */

import DOMPurify from '../vendor/dompurify/purify.es.mjs';
import { Marked } from '../vendor/marked/marked.esm.js';
import { CodeBlock } from './code_block.js';
import { element } from './dom.js';

/** Tags that models write within markdown and that carry no attributes. All other HTML is shown as the text it is. */
const INLINE_HTML = /^<\/?(?:b|i|u|s|em|strong|sub|sup|kbd|mark|br)\s*\/?>$/i;

const SANITIZER = {
  ALLOWED_TAGS: [
    ...['p', 'br', 'hr', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'ul', 'ol', 'li', 'blockquote', 'pre', 'code', 'a'],
    ...['b', 'i', 'u', 's', 'em', 'strong', 'del', 'sub', 'sup', 'kbd', 'mark'],
    ...['table', 'thead', 'tbody', 'tr', 'th', 'td'],
  ],
  ALLOWED_ATTR: ['href', 'title', 'class', 'start', 'align'],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // Attributes that are no addresses; DOMPurify would hold them to the next rule.
  ADD_URI_SAFE_ATTR: ['start', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** @param {string} text */
function escapeHtml(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html({ text }) {
      return INLINE_HTML.test(text.trim()) ? text : escapeHtml(text);
    },
    // Pictures would tell other servers what is read here: they become links.
    image({ href, text }) {
      return `<a href="${escapeHtml(href)}">${escapeHtml(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? '☑ ' : '☐ ';
    },
  },
});

/**
 * Without the last line as long as it is only the beginning of a list, a heading or a rule: "text, newline, dash" is a
 * heading to markdown, and would jump back to a paragraph at the next token.
 *
 * @param {string} text
 */
function withoutUnfinishedLine(text) {
  return text.replace(/\n[ \t]*(?:[-=*+_#>|`~]+|\d+[.)]?)[ \t]*$/, '\n');
}

/** @param {import('../vendor/marked/marked.esm.js').Token} token */
function renderBlock(token) {
  if (token.type === 'code') return new CodeBlock(token.text, token.lang ?? '');
  const block = element('div', { class: 'block' });
  block.append(DOMPurify.sanitize(marked.parser([token]), SANITIZER));
  for (const code of block.querySelectorAll('pre > code')) {
    const info = code.className.replace('language-', '');
    code.parentElement.replaceWith(new CodeBlock(code.textContent.replace(/\n$/, ''), info).element);
  }
  for (const link of block.querySelectorAll('a')) {
    link.rel = 'noopener noreferrer nofollow';
    link.target = '_blank';
  }
  for (const table of block.querySelectorAll('table')) {
    // The frame scrolls when the table is wider than the column.
    const frame = element('div', { class: 'table-frame', tabindex: '0' });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const part of block.querySelectorAll('p, h1, h2, h3, h4, h5, h6, ul, ol, blockquote, table')) part.dir = 'auto';
  return { element: block };
}

/**
 * @typedef {object} Block what is drawn of one top-level token
 * @property {string} raw
 * @property {string} type
 * @property {string} [lang]
 * @property {{element: HTMLElement, update?: (text: string) => void}} view
 */

export class Markdown {
  /** @type {Block[]} */
  #blocks = [];
  #text = null;
  #restUntil = 0;

  /** @param {HTMLElement} container */
  constructor(container) {
    this.container = container;
  }

  /**
   * @param {string} text
   * @param {boolean} isStreaming whether more is to come
   */
  update(text, isStreaming) {
    const shown = isStreaming ? withoutUnfinishedLine(text) : text;
    const begin = performance.now();
    if (shown === this.#text || (isStreaming && begin < this.#restUntil)) return;
    this.#text = shown;
    try {
      this.#draw(shown);
    } catch {
      // Some thousand nested quotes are too deep for a parser, and not beyond a small model that repeats itself.
      this.#blocks = [];
      this.container.replaceChildren(element('p', { class: 'plain' }, shown));
    }
    // Text that takes long to draw is drawn less often, so that the page stays usable meanwhile.
    const end = performance.now();
    this.#restUntil = end + 4 * (end - begin);
  }

  #draw(text) {
    const tokens = marked.lexer(text);
    // A link's target may be given anywhere below it, and changes blocks whose own text stays the same.
    const hasReferences = Object.keys(tokens.links).length > 0;
    const blocks = tokens.filter((token) => token.type !== 'space' && token.type !== 'def');
    if (this.#blocks.length === 0) this.container.replaceChildren();
    blocks.forEach((token, index) => {
      const block = this.#blocks[index];
      if (block && block.raw === token.raw && !hasReferences) return;
      if (block?.type === 'code' && token.type === 'code' && block.lang === token.lang) {
        block.view.update(token.text);
        block.raw = token.raw;
        return;
      }
      const view = renderBlock(token);
      if (block) block.view.element.replaceWith(view.element);
      else this.container.append(view.element);
      this.#blocks[index] = { raw: token.raw, type: token.type, lang: token.lang, view };
    });
    for (const { view } of this.#blocks.splice(blocks.length)) view.element.remove();
  }
}
