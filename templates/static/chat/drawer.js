/** On a narrow screen the sidebar is a drawer over the page. */

import { byTestId } from './dom.js';

export class Drawer {
  #sidebar = byTestId('sidebar');
  #main = document.getElementById('main');
  #toggle = byTestId('menu-toggle');
  #isNarrow = window.matchMedia('(max-width: 48rem)');
  #isOpen = false;

  constructor() {
    this.#toggle.addEventListener('click', () => this.open());
    document.getElementById('drawer-backdrop').addEventListener('click', () => this.close());
    byTestId('drawer-close').addEventListener('click', () => this.close());
    this.#isNarrow.addEventListener('change', () => {
      this.#isOpen = false;
      this.#draw();
    });
    this.#draw();
  }

  get isOpen() {
    return this.#isOpen;
  }

  open() {
    if (!this.#isNarrow.matches) return;
    this.#isOpen = true;
    this.#draw();
    byTestId('drawer-close').focus();
  }

  close() {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    this.#draw();
    this.#toggle.focus();
  }

  #draw() {
    document.body.toggleAttribute('data-drawer', this.#isOpen);
    this.#toggle.setAttribute('aria-expanded', String(this.#isOpen));
    // What lies behind the drawer, or the drawer itself while it is closed, is out of reach for the keyboard too.
    this.#sidebar.inert = this.#isNarrow.matches && !this.#isOpen;
    this.#main.inert = this.#isOpen;
  }
}
