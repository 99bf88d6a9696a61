/** The few helpers that building a page by hand needs. */

const SPRITE = new URL('../icons/sprite.svg', import.meta.url).href;
const SVG = 'http://www.w3.org/2000/svg';

/**
 * Create an element. `testid` becomes `data-testid`, `on` holds listeners, a boolean sets or leaves out the attribute;
 * strings among the children become text, `null` and `false` are left out.
 *
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | null | false)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'on') {
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    } else if (name === 'testid') {
      node.dataset.testid = value;
    } else if (typeof value === 'boolean') {
      node.toggleAttribute(name, value);
    } else if (value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

/**
 * One drawing of icons/sprite.svg.
 * @param {string} name
 */
export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `${SPRITE}#${name}`);
  svg.append(use);
  return svg;
}

/**
 * A button that shows only an icon; its label is read aloud and shown as a tooltip.
 * @param {string} iconName
 * @param {string} label
 * @param {string} testid
 * @param {(event: MouseEvent) => void} onClick
 */
export function iconButton(iconName, label, testid, onClick) {
  return element(
    'button',
    { type: 'button', class: 'icon-button', testid, 'aria-label': label, title: label, on: { click: onClick } },
    icon(iconName),
  );
}

/**
 * Make `parent` hold exactly `nodes`, in that order, without touching those that are in place already: moving a node
 * would take the focus and the text selection out of it.
 *
 * @param {Element} parent
 * @param {Node[]} nodes
 */
export function reconcile(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) {
    if (!wanted.has(child)) child.remove();
  }
  nodes.forEach((node, index) => {
    if (parent.childNodes[index] !== node) parent.insertBefore(node, parent.childNodes[index] ?? null);
  });
}

/** @param {string} testid */
export function byTestId(testid) {
  return document.querySelector(`[data-testid="${testid}"]`);
}
