/** Speaks to screen readers. The thread itself is silent: nobody wants to hear an answer token by token. */

const status = document.getElementById('announcements');

/** @param {string} text */
export function announce(text) {
  // The same text twice in a row is only spoken when it changes in between.
  status.textContent = '';
  requestAnimationFrame(() => {
    status.textContent = text;
  });
}
