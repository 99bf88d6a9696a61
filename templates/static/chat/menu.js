/**
 * Menus that open from a button. The popover does the closing (Escape, a click elsewhere) and lies above everything;
 * this adds the place beside the button and the arrow keys.
 */

const GAP_PX = 6;

/**
 * @param {HTMLButtonElement} button
 * @param {HTMLElement} menu with role="menu"; its focusable parts have a role that begins with "menuitem"
 */
export function attachMenu(button, menu) {
  const items = () => [...menu.querySelectorAll('[role^="menuitem"]')];
  menu.popover = 'auto';
  button.setAttribute('aria-haspopup', 'menu');
  button.setAttribute('aria-expanded', 'false');
  button.popoverTargetElement = menu;

  function place() {
    const anchor = button.getBoundingClientRect();
    const { width, height } = menu.getBoundingClientRect();
    const below = anchor.bottom + GAP_PX;
    const top = below + height > window.innerHeight ? anchor.top - GAP_PX - height : below;
    const left = Math.min(anchor.left, window.innerWidth - width - GAP_PX);
    menu.style.top = `${Math.max(GAP_PX, top)}px`;
    menu.style.left = `${Math.max(GAP_PX, left)}px`;
  }

  menu.addEventListener('beforetoggle', ({ newState }) => {
    // It has no size before it is shown; the frame's callback comes after that and before anything is painted.
    if (newState === 'open') requestAnimationFrame(place);
  });
  menu.addEventListener('toggle', ({ newState }) => {
    const isOpen = newState === 'open';
    button.setAttribute('aria-expanded', String(isOpen));
    if (isOpen) items()[0]?.focus();
  });
  menu.addEventListener('keydown', (event) => {
    const all = items();
    const current = all.indexOf(document.activeElement);
    const targets = {
      ArrowDown: all[(current + 1) % all.length],
      ArrowUp: all[(current - 1 + all.length) % all.length],
      Home: all[0],
      End: all.at(-1),
    };
    if (targets[event.key]) {
      event.preventDefault();
      targets[event.key].focus();
    } else if (event.key === 'Tab') {
      menu.hidePopover();
    }
  });
}
