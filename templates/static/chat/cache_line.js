/** The small line below an answer: what it cost, as the engine counted it. */

import { element } from './dom.js';
import { formatNumber, formatPercent, gettext, interpolate, ngettext } from './i18n.js';

/** @param {string} exactness */
function exactnessLabel(exactness) {
  if (exactness === 'quantized') {
    return [
      gettext('quantized cache'),
      gettext(
        'Some of the cached state was stored with fewer bits. The answer may differ a little from a full recomputation.',
      ),
    ];
  }
  return [
    gettext('approximate cache'),
    gettext(
      'Some of the cached state was moved to a changed context. The answer may differ from a full recomputation.',
    ),
  ];
}

/**
 * @param {import('./store.js').Report} report
 * @returns {HTMLElement}
 */
export function cacheLine(report) {
  const share = report.prompt_tokens ? report.cached_tokens / report.prompt_tokens : 0;
  const warmth = element('span', { class: 'warmth', 'aria-hidden': 'true' });
  warmth.style.setProperty('--share', share);

  const facts = [
    interpolate(ngettext('%(count)s prompt token', '%(count)s prompt tokens', report.prompt_tokens), {
      count: formatNumber(report.prompt_tokens),
    }),
    interpolate(gettext('%(share)s from cache'), { share: formatPercent(share) }),
  ];
  if (report.time_to_first_token !== null) {
    const seconds = report.time_to_first_token;
    facts.push(
      interpolate(gettext('first token in %(seconds)s s'), { seconds: formatNumber(seconds, seconds < 10 ? 2 : 1) }),
    );
  }
  if (report.tokens_per_second !== null) {
    const speed = report.tokens_per_second;
    facts.push(interpolate(gettext('%(speed)s tokens/s'), { speed: formatNumber(speed, speed < 10 ? 1 : 0) }));
  }
  const line = element('div', { class: 'cache-line', testid: 'cache-line' }, warmth);
  for (const fact of facts) line.append(element('span', { class: 'fact' }, fact));
  if (report.exactness !== 'exact') {
    const [label, explanation] = exactnessLabel(report.exactness);
    line.append(element('span', { class: 'fact exactness', title: explanation }, label));
  }
  if (report.left_out_messages > 0) {
    const text = ngettext(
      '%(count)s older message left out',
      '%(count)s older messages left out',
      report.left_out_messages,
    );
    const explanation = gettext('The conversation has outgrown what the model can read at once.');
    line.append(
      element(
        'span',
        { class: 'fact', title: explanation },
        interpolate(text, { count: formatNumber(report.left_out_messages) }),
      ),
    );
  }
  return line;
}
