/** Asks before something that cannot be undone. */

import { element } from './dom.js';
import { gettext } from './i18n.js';

/**
 * @param {{title: string, text: string, action: string, testid: string}} question
 * @returns {Promise<boolean>}
 */
export function confirmAction({ title, text, action, testid }) {
  return new Promise((resolve) => {
    const dialog = element(
      'dialog',
      { class: 'dialog small', 'aria-labelledby': 'confirm-title' },
      element(
        'form',
        { method: 'dialog' },
        element('h2', { id: 'confirm-title' }, title),
        element('p', { dir: 'auto' }, text),
        element(
          'div',
          { class: 'dialog-buttons' },
          element('button', { class: 'button', value: '', autofocus: true }, gettext('Cancel')),
          element('button', { class: 'button danger', value: 'confirmed', testid }, action),
        ),
      ),
    );
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(dialog.returnValue === 'confirmed');
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
