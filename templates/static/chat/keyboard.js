/** Shortcuts that work everywhere on the page. */

import { byTestId } from './dom.js';

/** @param {EventTarget | null} target */
function isWriting(target) {
  return target instanceof HTMLElement && target.matches('input, textarea, select, [contenteditable]');
}

/**
 * @param {object} context
 * @param {import('./actions.js').Actions} context.actions
 * @param {import('./drawer.js').Drawer} context.drawer
 * @param {() => void} context.onNewChat
 */
export function startKeyboard({ actions, drawer, onNewChat }) {
  const search = byTestId('search');

  function focusSearch(event) {
    event.preventDefault();
    drawer.open();
    search.focus();
    search.select();
  }

  document.addEventListener('keydown', (event) => {
    if (event.isComposing || event.keyCode === 229) return;
    const isCommand = event.ctrlKey || event.metaKey;
    const key = event.key.toLowerCase();
    // An open dialog or menu has the keyboard to itself; the browser closes it on Escape.
    if (document.querySelector('dialog[open], [popover]:popover-open')) return;
    if (isCommand && event.shiftKey && key === 'o') {
      event.preventDefault();
      onNewChat();
    } else if (isCommand && !event.shiftKey && key === 'k') {
      focusSearch(event);
    } else if (key === '/' && !isCommand && !event.altKey && !isWriting(event.target)) {
      focusSearch(event);
    } else if (key === 'escape') {
      if (drawer.isOpen) drawer.close();
      else actions.stop();
    }
  });
}
