/** Copying, also on plain http, where browsers have no `navigator.clipboard`. */

import { announce } from './announce.js';
import { icon } from './dom.js';
import { gettext } from './i18n.js';

const CONFIRMATION_MS = 1600;

/** @param {string} text */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement('textarea');
  area.className = 'visually-hidden';
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  focused?.focus();
  if (!copied) throw new Error('copying was refused');
}

/**
 * Copy, and show on the button that it happened.
 * @param {HTMLElement} button with an icon
 * @param {string} text
 */
export async function copyFrom(button, text) {
  let shown = 'check';
  try {
    await copy(text);
    announce(gettext('Copied'));
  } catch {
    shown = 'alert';
    announce(gettext('Copying was not allowed by the browser.'));
  }
  const drawing = button.querySelector('.icon');
  if (drawing.hasAttribute('data-confirmation')) return;
  const confirmation = icon(shown);
  confirmation.setAttribute('data-confirmation', '');
  drawing.replaceWith(confirmation);
  setTimeout(() => confirmation.replaceWith(drawing), CONFIRMATION_MS);
}
