/**
 * A conversation as a tree of messages. Pure functions over the store's items.
 *
 * @typedef {import('./store.js').Item} Item
 * @typedef {Map<string, Item>} Items in order of creation
 */

/** @param {Item} item */
export function isActive(item) {
  return item.state === 'draft' || item.state === 'streaming';
}

/** @param {Items} items */
export function isAnswering(items) {
  return [...items.values()].some(isActive);
}

/**
 * The branch that ends in `leaf`, from its root.
 * @param {Items} items
 * @param {string | null} leaf
 * @returns {Item[]}
 */
export function branchTo(items, leaf) {
  const branch = [];
  for (let item = items.get(leaf); item; item = items.get(item.parent)) branch.push(item);
  return branch.reverse();
}

/**
 * The messages at the same place of the tree: other wordings of a question, other answers to it.
 * @param {Items} items
 * @param {Item} item
 */
export function siblings(items, item) {
  return [...items.values()].filter((other) => other.parent === item.parent && other.role === item.role);
}

/**
 * Whether `ancestor` lies on the branch that ends in `id`.
 * @param {Items} items
 * @param {string} id
 * @param {string} ancestor
 */
export function isBelow(items, id, ancestor) {
  return branchTo(items, id).some((item) => item.id === ancestor);
}
