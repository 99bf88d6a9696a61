/** localStorage that never throws: it may be switched off, full, or hold what an older version wrote. */

/** @param {string} key */
export function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? 'null');
  } catch {
    return null;
  }
}

/**
 * @param {string} key
 * @param {unknown} value null removes the key
 */
export function write(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // Without storage a draft lives as long as the page does.
  }
}
