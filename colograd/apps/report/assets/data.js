// The runs of this page: what was there from the start, what is new (live), and steps that are unpacked when opened.

const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs.map((data, index) => asRun({}, data, index));
const several = () => runs.length > 1;

const state = { view: "overview", step: null, run: 0, smoothing: 0, theme: null };
const listeners = [];

// Everything that a click changes goes through here; reasons tell the views what to draw again.
function change(values) {
  const reasons = Object.keys(values).filter((key) => state[key] !== values[key]);
  if (!reasons.length) return;
  Object.assign(state, values);
  for (const listener of listeners) listener(new Set(reasons));
  writeAddress();
}

function writeAddress() {
  const parts = [`view=${state.view}`];
  if (state.step !== null) parts.push(`step=${state.step}`);
  if (state.run) parts.push(`run=${state.run}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

function readAddress(views) {
  const given = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d{1,15}$/.test(given.get(name) || "") ? Number(given.get(name)) : null);
  return {
    view: views.includes(given.get("view")) ? given.get("view") : "overview",
    step: number("step"),
    run: Math.min(number("run") || 0, Math.max(runs.length - 1, 0)),
  };
}

function asRun(run, data, index) {
  run.index = index;
  run.cache = new Map();
  Object.assign(run, data);
  run.held = new Map(data.held);
  run.texts = new Map(Object.entries(data.texts)); // of prompts, by key, as far as they are known
  return run;
}

// Replace a run's data by newer data. Steps that were unpacked stay if they haven't changed.
function renew(run, news) {
  const { cache, changed, texts } = run;
  asRun(run, news, run.index);
  for (const [step, content] of cache) if (changed[step] === news.changed[step]) run.cache.set(step, content);
  run.texts = new Map([...texts, ...run.texts]);
}

const column = (run, name) => (Object.hasOwn(run.columns, name) ? run.columns[name] : null);

function metric(run, name, step) {
  const values = column(run, name);
  const place = values ? run.steps.indexOf(step) : -1;
  return place < 0 ? null : values[place];
}

function lastOf(values) {
  for (let place = (values || []).length - 1; place >= 0; place--) if (isNumber(values[place])) return values[place];
  return null;
}

// All steps that something is known of, in order.
function allSteps() {
  const found = new Set();
  for (const run of runs) {
    for (const step of run.steps) found.add(step);
    for (const step of run.held.keys()) found.add(step);
    for (const step of run.evaluations.steps) found.add(step);
  }
  return [...found].sort((a, b) => a - b);
}

function nearest(steps, step) {
  let best = null;
  for (const each of steps) if (best === null || Math.abs(each - step) <= Math.abs(best - step)) best = each;
  return best;
}

const MOST_CACHED = 64;

// A step's rollouts, groups and completions.
function loadStep(run, step) {
  if (!run.cache.has(step)) {
    if (run.cache.size >= MOST_CACHED) run.cache.delete(run.cache.keys().next().value);
    const found = page.live ? fetchStep(step) : unpack(document.getElementById(`step-${run.index}-${step}`));
    run.cache.set(step, found.then((content) => prepared(run, content)));
    found.catch(() => run.cache.delete(step));
  }
  return run.cache.get(step);
}

async function fetchStep(step) {
  const answer = await fetch(`step?step=${step}`);
  if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
  return answer.json();
}

async function unpack(element) {
  if (!element) throw new Error("This step isn't in the page.");
  if (typeof DecompressionStream === "undefined") throw new Error("This browser can't unpack a step: one made since 2023 can.");
  const packed = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function prepared(run, content) {
  for (const [key, text] of Object.entries(content.texts || {})) run.texts.set(key, text);
  for (const completion of content.completions) {
    completion.step = content.step;
    completion.promptValue = content.prompts[completion.prompt];
    if (completion.key && !run.texts.has(completion.key)) run.texts.set(completion.key, short(promptText(completion.promptValue), BEGINNING));
    if (completion.tokens) completion.text = completion.tokens.join("");
    if (!isNumber(completion.reward)) completion.reward = weighted(run, completion.rewards);
    if (completion.sampler && completion.trainer)
      completion.difference = completion.sampler.map((value, place) => (isNumber(value) && isNumber(completion.trainer[place]) ? completion.trainer[place] - value : null));
  }
  return content;
}

function weighted(run, rewards) {
  const names = run.run.reward_names || [], weights = run.run.reward_weights || [];
  let found = null;
  for (const [name, value] of Object.entries(rewards || {})) {
    if (!isNumber(value)) continue;
    const weight = weights[names.indexOf(name)];
    found = (found || 0) + (isNumber(weight) ? weight : 1) * value;
  }
  return found;
}

function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  if (!Array.isArray(prompt) || !prompt.length) return "";
  const asked = prompt.filter((message) => message.role === "user").pop() || prompt[prompt.length - 1];
  return messageText(asked);
}

const messageText = ({ content }) => (typeof content === "string" ? content : Array.isArray(content) && content.every((part) => part && part.type) ? content.map((part) => part.text ?? `⟨${part.type}⟩`).join(" ") : content ? JSON.stringify(content) : "");

// A prompt is named by its text; its key is the last resort.
const BEGINNING = 160;
const promptName = (run, key) => (run.texts.get(key) || `a prompt whose text wasn't recorded (${key.slice(0, 8)})`).replace(/\s+/g, " ");

// Live: ask for newer data, every two seconds, seldom where nobody looks.
const EVERY = 2000, HIDDEN = 20000;

async function follow(arrived) {
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? HIDDEN : EVERY));
    try {
      const answer = await fetch(`data?after=${runs[0].change}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const news = await answer.json();
      if (news.change !== runs[0].change) renew(runs[0], news);
      arrived(news, true);
    } catch {
      arrived(null, false);
    }
  }
}
