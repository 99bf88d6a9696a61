/** Puts the chat page together. */

import { Actions } from './actions.js';
import { startBanners } from './banners.js';
import { startComposer } from './composer.js';
import { byTestId } from './dom.js';
import { Drawer } from './drawer.js';
import { gettext } from './i18n.js';
import { startKeyboard } from './keyboard.js';
import { attachMenu } from './menu.js';
import { Router } from './router.js';
import { startSettings } from './settings.js';
import { startSidebar, titleOf } from './sidebar.js';
import { Socket } from './socket.js';
import { Store } from './store.js';
import { Sync } from './sync.js';
import { startThemeButton } from './theme.js';
import { startThread } from './thread.js';

const data = JSON.parse(document.getElementById('chat-data').textContent);
const signInUrl = document.body.dataset.signInUrl;
const socketUrl = new URL('/ws/', window.location.href.replace(/^http/, 'ws'));

const store = new Store();
const socket = new Socket(socketUrl.href);
const router = new Router(data, (conversation) => show(conversation));
const actions = new Actions(store, socket, router);
const drawer = new Drawer();
const sync = new Sync(store, socket, {
  onUnsent(conversation, text) {
    actions.returnText(conversation, text);
    store.dispatch({ type: 'composer/refused', conversation, error: { code: 'not_sent' } });
  },
  onMissing(conversation, unsent) {
    leave(conversation);
    if (unsent) actions.returnText(null, unsent);
    store.dispatch({ type: 'new-chat/refused', error: { code: unsent ? 'not_sent' : 'not_found' } });
  },
  onDeleted: leave,
});

/** Show a conversation without changing the page's address. */
function show(conversation) {
  store.dispatch({ type: 'conversation/shown', id: conversation });
  // Before the connection stands there is nobody to ask; once it does, what is shown is opened.
  if (conversation !== null && store.state.connection === 'open') sync.open(conversation);
}

/** @param {string | null} conversation */
function goTo(conversation) {
  router.push(conversation);
  show(conversation);
  drawer.close();
  composer.focus();
}

/** Go to the new chat from a conversation that is no longer there. */
function leave(conversation) {
  if (window.location.pathname === router.urlOf(conversation)) router.replace(null);
  if (store.state.shown === conversation) show(null);
}

store.dispatch({ type: 'conversation/shown', id: data.conversation });
startBanners(store);
startThread(store, { actions, sync });
startSidebar(store, { actions, sync, router, onOpen: goTo });
startSettings(store, actions);
startThemeButton(byTestId('theme'));
startKeyboard({ actions, drawer, onNewChat: () => goTo(null) });
attachMenu(byTestId('user-menu'), document.getElementById('user-menu'));
const composer = startComposer(store, actions);

byTestId('new-chat').addEventListener('click', (event) => {
  event.preventDefault();
  goTo(null);
});

const heading = document.getElementById('conversation-title');
store.subscribe((state, drawn) => {
  if (drawn && state.shown === drawn.shown && state.conversations === drawn.conversations) return;
  const title = state.shown === null ? gettext('New chat') : titleOf(state.conversations.get(state.shown));
  heading.textContent = title;
  document.title = `${title} · Keepwarm`;
});

socket.addEventListener('signed-out', () => {
  window.location.assign(`${signInUrl}?next=${encodeURIComponent(window.location.pathname)}`);
});
socket.connect();
composer.focus();
