/** What failed, with a button to try it again. */

import { element, icon } from './dom.js';
import { errorDetails, errorText } from './errors.js';
import { gettext } from './i18n.js';

/**
 * @param {import('./errors.js').ErrorDetail} error
 * @param {string} testid
 * @param {() => void} onRetry
 */
export function errorBox(error, testid, onRetry) {
  return element(
    'div',
    { class: 'error-box', testid },
    icon('alert'),
    element('span', {}, errorText(error)),
    element('small', { class: 'error-details', dir: 'auto' }, errorDetails(error)),
    element(
      'button',
      { type: 'button', class: 'button small', testid: 'retry', on: { click: onRetry } },
      gettext('Retry'),
    ),
  );
}
