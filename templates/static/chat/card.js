/** The little that the account pages need. */

import { byTestId } from './dom.js';
import { startThemeButton } from './theme.js';

startThemeButton(byTestId('theme'));
