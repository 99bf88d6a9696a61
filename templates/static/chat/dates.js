/** Groups of the sidebar, by the user's own days. */

import { gettext } from './i18n.js';

/** @param {Date} moment @param {number} days */
function daysBefore(moment, days) {
  // Through the calendar, not by 24 hours: days with a clock change have 23 or 25.
  return new Date(moment.getFullYear(), moment.getMonth(), moment.getDate() - days);
}

/**
 * @param {Date} moment
 * @param {Date} now
 * @returns {string} the group's heading
 */
export function dateGroup(moment, now) {
  if (moment >= daysBefore(now, 0)) return gettext('Today');
  if (moment >= daysBefore(now, 1)) return gettext('Yesterday');
  if (moment >= daysBefore(now, 7)) return gettext('Previous 7 days');
  if (moment >= daysBefore(now, 30)) return gettext('Previous 30 days');
  return gettext('Older');
}
