// Elements whose content is always text.

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** A token's text so that a space before it and ends of lines can be seen. */
export function visible(token) {
  if (token.text === "") return `token ${token.token_id}`;
  const spaced = token.text.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
  return spaced.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export const percent = (share) => `${Math.round(100 * share)} %`;
