/**
 * Which pages of this browser are still open: each has a name of its own and holds a lock of that name as long as it
 * lives. Where there are no locks (they exist only on https and localhost) the pages ask each other instead.
 */

import { newId } from './ids.js';

const ANSWER_MS = 1000;
const PREFIX = 'keepwarm:page:';

/** The name of this page. A reload gives another one, and so does a duplicate of its tab. */
export const thisPage = newId();

const { locks } = navigator;
locks?.request(PREFIX + thisPage, () => new Promise(() => {})).catch(() => {});

const channel = locks || !globalThis.BroadcastChannel ? null : new BroadcastChannel('keepwarm:pages');
channel?.addEventListener('message', ({ data }) => {
  if (data === 'who is open?') channel.postMessage(thisPage);
});

/** @returns {Promise<Set<string>>} the names of the open pages */
export async function openPages() {
  if (locks) {
    const { held, pending } = await locks.query();
    return new Set([...held, ...pending].map(({ name }) => name.slice(PREFIX.length)));
  }
  const pages = new Set([thisPage]);
  if (!channel) return pages;
  const listen = ({ data }) => pages.add(data);
  channel.addEventListener('message', listen);
  channel.postMessage('who is open?');
  await new Promise((resolve) => setTimeout(resolve, ANSWER_MS));
  channel.removeEventListener('message', listen);
  return pages;
}
