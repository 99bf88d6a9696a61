/** Where the user writes. A text leaves it only when it is shown in the thread and kept until the server has it. */

import { announce } from './announce.js';
import { readDraft, writeDraft } from './drafts.js';
import { byTestId } from './dom.js';
import { errorText } from './errors.js';
import { fitHeight } from './message.js';
import { branchTo, isActive } from './tree.js';

/**
 * @param {import('./store.js').Store} store
 * @param {import('./actions.js').Actions} actions
 */
export function startComposer(store, actions) {
  const form = document.getElementById('composer-form');
  const area = byTestId('composer');
  const sendButton = byTestId('send');
  const stopButton = byTestId('stop');
  const errorLine = byTestId('composer-error');
  let conversation = store.state.shown;

  function drawButtons() {
    const thread = store.state.threads.get(store.state.shown);
    const isAnswering = thread !== undefined && branchTo(thread.items, thread.leaf).some(isActive);
    const isBlank = area.value.trim() === '';
    stopButton.hidden = !isAnswering;
    // While an answer is written its button is the one to stop it, until the user has written something to send.
    sendButton.hidden = isAnswering && isBlank;
    sendButton.disabled = isBlank;
  }

  function setText(text) {
    area.value = text;
    fitHeight(area);
    drawButtons();
  }

  function send() {
    const text = area.value;
    if (text.trim() === '') return;
    if (!actions.send(text)) return;
    writeDraft(conversation, '');
    // In a new chat the message has created its conversation; what is typed from now on belongs there.
    conversation = store.state.shown;
    setText('');
    area.focus();
  }

  form.addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  area.addEventListener('input', () => {
    writeDraft(conversation, area.value);
    fitHeight(area);
    drawButtons();
  });
  area.addEventListener('keydown', (event) => {
    // Enter that confirms a Chinese or Japanese word belongs to the input method; Safari tells by the code alone.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === 'Enter' && !event.shiftKey) {
      event.preventDefault();
      send();
    }
  });
  stopButton.addEventListener('click', () => {
    actions.stop();
    area.focus();
  });
  for (const example of document.querySelectorAll('[data-example]')) {
    example.addEventListener('click', () => {
      setText(example.dataset.example);
      writeDraft(conversation, area.value);
      area.focus();
    });
  }
  actions.onTextReturned = (place) => {
    if (place === conversation) setText(readDraft(conversation));
  };
  window.addEventListener('resize', () => fitHeight(area));

  store.subscribe((state, drawn) => {
    if (!drawn || state.shown !== conversation) {
      conversation = state.shown;
      setText(readDraft(conversation));
    }
    const error = state.shown === null ? state.newChatError : state.threads.get(state.shown)?.composerError;
    const text = error ? errorText(error) : '';
    if (errorLine.textContent !== text) {
      errorLine.textContent = text;
      errorLine.hidden = text === '';
      if (text) announce(text);
    }
    drawButtons();
  });

  return {
    focus() {
      // On a phone it would bring up the keyboard over what the user came to read.
      if (window.matchMedia('(pointer: fine)').matches) area.focus();
    },
  };
}
