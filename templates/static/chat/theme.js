/** Light, dark, or as the system has it. theme_early.js applies the choice on the next page. */

import { icon } from './dom.js';
import { gettext } from './i18n.js';
import { write } from './storage.js';

const THEMES = {
  auto: { icon: 'theme-auto', label: gettext('Theme: as the system') },
  light: { icon: 'sun', label: gettext('Theme: light') },
  dark: { icon: 'moon', label: gettext('Theme: dark') },
};

function show(button, theme) {
  const { icon: iconName, label } = THEMES[theme];
  button.querySelector('.icon').replaceWith(icon(iconName));
  const text = button.querySelector('[data-label]');
  if (text) {
    text.textContent = label;
  } else {
    button.setAttribute('aria-label', label);
    button.title = label;
  }
}

/** @param {HTMLButtonElement} button goes through the themes, one a click */
export function startThemeButton(button) {
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  if (!names.includes(root.dataset.theme)) root.dataset.theme = 'auto';
  show(button, root.dataset.theme);
  button.addEventListener('click', () => {
    const next = names[(names.indexOf(root.dataset.theme) + 1) % names.length];
    root.dataset.theme = next;
    write('keepwarm:theme', next);
    show(button, next);
  });
}
