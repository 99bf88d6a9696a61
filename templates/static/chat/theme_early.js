// A classic script in the page's head: the theme is known before anything is drawn, so that nothing flashes.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem('keepwarm:theme')) || 'auto';
} catch {
  document.documentElement.dataset.theme = 'auto';
}
