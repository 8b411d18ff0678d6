// The chosen theme, set before anything is painted. Without a choice the system's applies.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("multilora-theme");
  } catch {
    // Storage may be forbidden: the system's theme will do.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
