/**
 * The page's language: translated texts, numbers and dates.
 *
 * The functions come from Django's JavaScriptCatalog, a classic script loaded before the modules. Should it fail to
 * load, the page still works in English.
 */

/** @type {(text: string) => string} */
export const gettext = globalThis.gettext ?? ((text) => text);

/** @type {(singular: string, plural: string, count: number) => string} */
export const ngettext = globalThis.ngettext ?? ((singular, plural, count) => (count === 1 ? singular : plural));

/**
 * Fill the `%(name)s` places of a translated text.
 * @param {string} text
 * @param {Record<string, string | number>} values
 */
export function interpolate(text, values) {
  return text.replace(/%\((\w+)\)s/g, (place, name) => (name in values ? String(values[name]) : place));
}

const language = document.documentElement.lang || 'en';

/**
 * @param {number} value
 * @param {number} [digits] digits after the point
 */
export function formatNumber(value, digits = 0) {
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** @param {number} share 0 to 1 */
export function formatPercent(share) {
  return share.toLocaleString(language, { style: 'percent', maximumFractionDigits: 0 });
}

/** @param {string} moment ISO 8601 */
export function formatMoment(moment) {
  return new Date(moment).toLocaleString(language, { dateStyle: 'medium', timeStyle: 'short' });
}
