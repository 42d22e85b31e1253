// The page: what the user does, and what becomes of it.
import { apiKey, modelName } from "./client.js";
import { Card } from "./card.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { Gauges } from "./meter.js";
import { Settings } from "./settings.js";
import { Strip } from "./strip.js";

const get = (id) => document.getElementById(id);
const [prompt, send, compare, gone, keyForm] = ["prompt", "send", "compare", "gone", "key-form"].map(get);

const card = new Card(get("card"));
const strip = new Strip(get("strip"), card);
const settings = new Settings(get("settings"), get("settings-box"));
const conversation = new Conversation(get("conversation"), { card, strip, gauges: new Gauges(), settings });
const mode = () => document.querySelector("input[name=mode]:checked").value;

const connection = new Connection(async (trouble) => {
  gone.textContent = trouble;
  gone.hidden = trouble === "";
  get("lamp").className = `lamp ${trouble ? "off" : "on"}`;
  showModel(trouble ? "not connected" : await modelName().catch(() => "connected"));
});

/** The last part of a name is what people know; the whole is a hover away. */
function showModel(name) {
  get("model").textContent = name.split("/").pop();
  get("model").title = name;
}

async function submit() {
  const text = prompt.value;
  if (!text.trim() || conversation.running || !settings.valid()) return;
  if (!connection.well) return void connection.check();
  prompt.value = "";
  get("welcome").hidden = true;
  send.textContent = "Stop";
  const { answered, failure } = await conversation.ask(text, mode(), compare.checked);
  send.textContent = conversation.running ? "Stop" : "Send";
  if (failure) refused(failure, answered ? "" : text);
}

/** Give `text` back where nothing came of it, and ask for what would help. */
function refused(failure, text) {
  if (!prompt.value) prompt.value = text;
  if (failure.status === 401) {
    keyForm.hidden = false;
    get("key").focus();
  } else if (failure.status === 0 || failure.status === 503) connection.check();
}

function showMode() {
  const chat = mode() === "chat";
  prompt.placeholder = chat ? "Ask something" : "Begin a text";
  settings.form.elements.system.disabled = !chat;
}

get("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (conversation.running) conversation.stop();
  else submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  conversation.stop();
  card.hide();
});
document.addEventListener("scroll", () => card.follow(), { capture: true, passive: true });
document.addEventListener("pointerdown", (event) => event.target.closest(".text, #strip") || card.hide());
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(get("key").value);
  get("key").value = "";
  keyForm.hidden = true;
  prompt.focus();
  modelName().then(showModel).catch(() => {}); // the answer to come says what is wrong
  submit();
});
get("fresh").addEventListener("click", () => {
  conversation.clear();
  get("welcome").hidden = false;
  prompt.focus();
});
get("examples").addEventListener("click", (event) => {
  if (!event.target.matches("button")) return;
  prompt.value = event.target.textContent;
  prompt.focus();
  submit();
});
document.querySelectorAll("input[name=mode]").forEach((radio) => radio.addEventListener("change", showMode));
showMode();
if (matchMedia("(pointer: fine)").matches) prompt.focus(); // on a phone this would open the keyboard
