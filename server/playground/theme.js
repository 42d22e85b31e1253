// Light or dark: as the system says, until the switch says otherwise. Runs before the first paint, so nothing flashes.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
  const stored = localStorage.getItem("dspark.theme");
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = current() === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `${button.textContent} theme`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      localStorage.setItem("dspark.theme", root.dataset.theme);
      label();
    });
    system.addEventListener("change", label);
    label();
  });
})();
