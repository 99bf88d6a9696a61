/** The dialog for a conversation's system prompt and sampling. An empty field means the server's default. */

import { byTestId } from './dom.js';
import { errorText } from './errors.js';
import { formatNumber, gettext, interpolate } from './i18n.js';

const STOP_STRINGS_MAX = 4;
const STOP_STRING_MAX_LENGTH = 100;

/** The numbers, by the names of the protocol. `above`: the smallest value is not allowed itself. */
const NUMBERS = {
  temperature: { min: 0, max: 2 },
  top_p: { min: 0, max: 1, above: true },
  top_k: { min: 0, max: 1_000_000, whole: true },
  max_output_tokens: { min: 1, max: 1_000_000, whole: true },
  // Larger seeds are allowed by the server, and would be rounded by JavaScript.
  seed: { min: 0, max: Number.MAX_SAFE_INTEGER, whole: true },
};

/** @param {HTMLInputElement} input */
function numberError(input, { min, max, above = false, whole = false }) {
  // A number field that holds something else has an empty value.
  if (input.value === '') return input.validity.badInput ? gettext('This is not a number.') : '';
  const value = Number(input.value);
  if (whole && !Number.isInteger(value)) return gettext('This has to be a whole number.');
  if (value < min || value > max || (above && value === min)) {
    const text = above
      ? gettext('This has to be above %(min)s and at most %(max)s.')
      : gettext('This has to be between %(min)s and %(max)s.');
    return interpolate(text, { min: formatNumber(min), max: formatNumber(max) });
  }
  return '';
}

/** @param {string[]} strings */
function stopError(strings) {
  if (strings.length > STOP_STRINGS_MAX) {
    return interpolate(gettext('At most %(count)s stop strings are possible.'), { count: STOP_STRINGS_MAX });
  }
  if (strings.some((text) => [...text].length > STOP_STRING_MAX_LENGTH)) {
    return interpolate(gettext('A stop string can have at most %(count)s characters.'), {
      count: STOP_STRING_MAX_LENGTH,
    });
  }
  return '';
}

/**
 * @param {import('./store.js').Store} store
 * @param {import('./actions.js').Actions} actions
 */
export function startSettings(store, actions) {
  const dialog = byTestId('settings-dialog');
  const form = dialog.querySelector('form');
  const saveButton = byTestId('settings-save');
  const { elements: fields } = form;
  let conversation = null;

  const errorLine = (name) => dialog.querySelector(`[data-error-of="${name}"]`);

  function showError(name, text) {
    errorLine(name).textContent = text;
    if (fields[name]) {
      if (text) fields[name].setAttribute('aria-invalid', 'true');
      else fields[name].removeAttribute('aria-invalid');
    }
  }

  function clearErrors() {
    for (const line of dialog.querySelectorAll('[data-error-of]')) showError(line.dataset.errorOf, '');
  }

  function fill({ system_prompt: systemPrompt, sampling }) {
    fields.system_prompt.value = systemPrompt;
    for (const name of Object.keys(NUMBERS)) fields[name].value = sampling[name] ?? '';
    fields.stop.value = (sampling.stop ?? []).join('\n');
    clearErrors();
  }

  const stopStrings = () => fields.stop.value.split('\n').filter((line) => line !== '');

  function readSettings() {
    const sampling = {};
    for (const name of Object.keys(NUMBERS)) {
      if (fields[name].value !== '') sampling[name] = Number(fields[name].value);
    }
    const stop = stopStrings();
    if (stop.length) sampling.stop = stop;
    return { system_prompt: fields.system_prompt.value, sampling };
  }

  /** @returns {boolean} whether everything is in order */
  function check() {
    clearErrors();
    for (const [name, range] of Object.entries(NUMBERS)) showError(name, numberError(fields[name], range));
    showError('stop', stopError(stopStrings()));
    const firstWrong = dialog.querySelector('[aria-invalid]');
    firstWrong?.focus();
    return firstWrong === null;
  }

  /** Show the server's error at the field that it names: `sampling.stop.0`, `system_prompt`. */
  function showRefusal(detail) {
    const name = (detail.param ?? '').replace(/^sampling\./, '').split('.')[0];
    const isField = errorLine(name) !== null;
    const text = detail.code === 'invalid_event' ? detail.message : errorText(detail);
    showError(isField ? name : 'form', text);
    if (isField) fields[name].focus();
  }

  async function save() {
    if (!check()) return;
    const settings = readSettings();
    if (conversation === null) {
      store.dispatch({ type: 'new-chat/changed', settings });
      dialog.close();
      return;
    }
    saveButton.disabled = true;
    try {
      await actions.update(conversation, settings);
      dialog.close();
    } catch ({ detail }) {
      showRefusal(detail);
    } finally {
      saveButton.disabled = false;
    }
  }

  byTestId('settings-open').addEventListener('click', () => {
    const { shown, conversations, newChat } = store.state;
    conversation = shown;
    fill(shown === null ? newChat : (conversations.get(shown) ?? newChat));
    dialog.showModal();
  });
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    save();
  });
  byTestId('settings-reset').addEventListener('click', () => fill({ system_prompt: '', sampling: {} }));
  byTestId('settings-cancel').addEventListener('click', () => dialog.close());
}
