/** Slim banners above the thread: the connection, the model as long as it is not ready, and what a page before said. */

import { announce } from './announce.js';
import { byTestId } from './dom.js';
import { formatPercent, gettext, interpolate } from './i18n.js';

/** @param {Record<string, any> | null} model */
function modelText(model) {
  const progress = model?.progress > 0 ? ` ${formatPercent(model.progress)}` : '';
  switch (model?.state) {
    case 'absent':
      return gettext('No worker is running. Messages are kept and answered when one starts.');
    case 'starting':
      return gettext('The worker is starting…');
    case 'converting':
      return gettext('Preparing the model…') + progress;
    case 'loading':
      return gettext('Loading the model…') + progress;
    case 'failed':
      return interpolate(gettext('The model could not be loaded: %(detail)s'), { detail: model.detail });
    default:
      return '';
  }
}

/** @param {HTMLElement} banner */
function show(banner, text) {
  const line = banner.querySelector('[data-text]');
  if (line.textContent === text) return false;
  line.textContent = text;
  banner.hidden = text === '';
  return text !== '';
}

/** How long a word from the page before stays, "Your password is set." for instance. */
const FLASH_MS = 8000;

/** @param {import('./store.js').Store} store */
export function startBanners(store) {
  const connection = byTestId('connection-banner');
  const model = byTestId('model-banner');
  const modelName = document.getElementById('model-name');
  for (const flash of document.querySelectorAll('[data-flash]')) setTimeout(() => flash.remove(), FLASH_MS);
  store.subscribe((state, drawn) => {
    if (drawn && state.connection === drawn.connection && state.model === drawn.model) return;
    const isLost = state.connection === 'lost';
    if (show(connection, isLost ? gettext('Connection lost. Reconnecting…') : '')) {
      announce(gettext('Connection lost. Reconnecting…'));
    }
    // What the model did before the connection was lost is no longer known.
    const isNew = show(model, isLost ? '' : modelText(state.model));
    model.dataset.state = state.model?.state ?? '';
    // Its progress would be read out at every percent.
    if (isNew && state.model?.state !== drawn?.model?.state) announce(modelText(state.model));
    modelName.textContent = state.model?.model ?? '';
  });
}
