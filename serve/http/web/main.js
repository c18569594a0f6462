// The page: which part is shown, which model, which key, which colours.

import { apiKey, getJson, setApiKey } from "./api.js";
import { ArtifactReport } from "./artifact.js";
import { Dashboard } from "./dashboard.js";
import { $, el } from "./dom.js";
import { Playground } from "./playground.js";

const TABS = ["playground", "dashboard", "artifact"];
const THEMES = [["", "◐", "as the system has them"], ["light", "☀", "light"], ["dark", "☾", "dark"]];
const GOOD = new Set(["serving", "asleep"]);

const playground = new Playground();
const artifact = new ArtifactReport($("report"));
const dashboard = new Dashboard(showState);

// ---------------------------------------------------------------------------------------------- what is shown

function showTab() {
  const wanted = location.hash.slice(1);
  const tab = TABS.includes(wanted) ? wanted : TABS[0];
  for (const each of TABS) $(each).hidden = each !== tab;
  for (const link of document.querySelectorAll("[data-tab]")) {
    if (link.dataset.tab === tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${tab[0].toUpperCase()}${tab.slice(1)} · inferc`;
  if (tab === "dashboard") dashboard.show();
  if (tab === "artifact") artifact.show($("model").value);
}

function showState(state, problem) {
  $("state").textContent = state;
  $("state").className = `badge ${GOOD.has(state) ? "good" : "bad"}`;
  $("banner").textContent = problem ? `${problem} Trying again every second.` : "";
  $("banner").hidden = !problem;
}

// --------------------------------------------------------------------------------------------------- models

async function loadModels() {
  let found;
  try {
    found = (await getJson("/v1/models")).data;
  } catch (error) {
    if (error.status !== 401) {
      showState("unknown", error.message);
      setTimeout(loadModels, 1000);
    }
    return;
  }
  const before = $("model").value;
  $("model").replaceChildren(...found.map((each) => el("option", { value: each.id, selected: each.id === before }, each.id)));
  if (!found.length) showState("no model", "No model is loaded.");
  else await chooseModel();
}

async function chooseModel() {
  const model = $("model").value;
  dashboard.setModel(model);
  let template = null;
  let defaults = null;
  try {
    ({ chat_template: template, sampling_defaults: defaults } = await getJson(`/tokenizer_info?model=${encodeURIComponent(model)}`));
  } catch (error) {
    showState("unknown", error.message);
  }
  playground.setModel(model, Boolean(template), defaults);
  dashboard.look();
  if (!$("artifact").hidden) artifact.show(model);
}

// ------------------------------------------------------------------------------------------------------ key

let isDeclined = false; // whether the user closed the dialog without a key, which is then not shown again

function askKey() {
  if ($("key-dialog").open) return;
  $("key-input").value = apiKey();
  $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  const choice = $("key-dialog").returnValue;
  isDeclined = choice !== "use";
  if (choice === "cancel" || choice === "") return;
  setApiKey(choice === "use" ? $("key-input").value.trim() : "");
  $("key-input").value = "";
  loadModels();
});

document.addEventListener("key-needed", () => {
  $("key-why").textContent = apiKey()
    ? "The server does not know this key, or not any more. Another one?"
    : "This server answers only who has a key. It stays in this tab, until you close it.";
  if (!isDeclined) askKey();
});

// ------------------------------------------------------------------------------------------------- colours

function setTheme(name) {
  const [value, sign, text] = THEMES.find((each) => each[0] === name) || THEMES[0];
  document.documentElement.dataset.theme = value;
  $("theme-button").textContent = sign;
  $("theme-button").setAttribute("aria-label", `Colours: ${text}`);
  $("theme-button").title = `Colours: ${text}`;
  localStorage.setItem("inferc.theme", value);
}

$("theme-button").addEventListener("click", () => {
  const at = THEMES.findIndex((each) => each[0] === document.documentElement.dataset.theme);
  setTheme(THEMES[(at + 1) % THEMES.length][0]);
});

$("key-button").addEventListener("click", askKey);
$("model").addEventListener("change", chooseModel);
window.addEventListener("hashchange", showTab);
setTheme(localStorage.getItem("inferc.theme") || "");
showTab();
loadModels();
