// A completion token by token, coloured by what the sampler, the trainer or the loss knew of it.

const MODES = {
  sampler: ["log-probability", "The sampler's: the darker, the less likely the token was."],
  difference: ["trainer − sampler", "Red: likelier to the trainer than to the sampler; blue: less likely. Full colour at half a nat."],
  advantage: ["advantage", "Green: pushed up; red: pushed down. Full colour at the largest of this completion's group."],
  mask: ["mask", "What isn't in the loss is struck through: a tool's words, or what was masked away."],
};

const colours = { mode: "sampler", largest: 1 };

function colourOf(completion, place) {
  const mode = colours.mode;
  const mix = (name, strength) => `color-mix(in srgb, ${css(name)} ${Math.round(100 * Math.min(Math.max(strength, 0), 1) * 0.75)}%, transparent)`;
  if (mode === "sampler") {
    const value = completion.sampler ? completion.sampler[place] : null;
    return isNumber(value) ? mix("--warn", -value / 5000) : "";
  }
  if (mode === "difference") {
    const value = completion.difference ? completion.difference[place] : null;
    return isNumber(value) ? mix(value > 0 ? "--bad" : "--accent", Math.sqrt(Math.abs(value) / 500)) : ""; // most are small
  }
  if (mode === "advantage") {
    const value = completion.advantages ? completion.advantages[place] : completion.advantage;
    return isNumber(value) ? mix(value > 0 ? "--good" : "--bad", Math.abs(value) / (colours.largest || 1)) : "";
  }
  return "";
}

const flag = (bits, place) => !bits || bits[place] === "1";

// What is known of a token, in words.
function tokenWords(completion, place) {
  const milli = (values) => (values && isNumber(values[place]) ? values[place] / 1000 : null);
  const sampler = milli(completion.sampler), trainer = milli(completion.trainer), difference = milli(completion.difference);
  const advantage = completion.advantages ? completion.advantages[place] : completion.advantage;
  return [
    `Token ${place + 1} of ${completion.tokens.length}`,
    JSON.stringify(visible(completion.tokens[place])),
    sampler !== null && `sampler ${sampler.toFixed(3)} nats (${percent(Math.exp(Math.min(sampler, 0)))})`,
    trainer !== null && `trainer ${trainer.toFixed(3)} nats`,
    difference !== null && `difference ${difference > 0 ? "+" : ""}${difference.toFixed(3)} nats`,
    isNumber(advantage) && `advantage ${fmt(advantage)}`,
    flag(completion.sampled, place) ? null : "not sampled (a tool's, or the template's)",
    flag(completion.mask, place) ? "in the loss" : "not in the loss",
  ].filter(Boolean).join(" · "); // prettier-ignore
}

function tokenView(completion) {
  if (!completion.tokens) return el("div.text", { tabIndex: 0 }, completion.text);
  const spans = completion.tokens.map((token, place) => {
    const span = el("span.token", {}, token.replace(/\n/g, "⏎\n"));
    if (!flag(completion.sampled, place)) span.classList.add("given");
    if (!flag(completion.mask, place)) span.classList.add("unmasked");
    return span;
  });
  const box = el("div.tokens", { tabIndex: 0, role: "group", "aria-label": "Tokens: arrow keys go from one to the next" }, spans);
  const told = el("p.told", { "aria-live": "polite" }, "Point at a token, or go through them with the arrow keys.");
  let chosen = -1;
  const choose = (place) => {
    if (chosen >= 0) spans[chosen].classList.remove("chosen");
    chosen = Math.max(0, Math.min(spans.length - 1, place));
    if (!spans.length) return;
    spans[chosen].classList.add("chosen");
    told.replaceChildren(tokenWords(completion, chosen));
  };
  const places = new Map(spans.map((span, place) => [span, place]));
  box.addEventListener("mouseover", (event) => places.has(event.target) && choose(places.get(event.target)));
  box.addEventListener("click", (event) => places.has(event.target) && choose(places.get(event.target)));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    choose(chosen + moves[event.key]);
  });
  const found = el("div", {}, box, told, completion.cut && el("p.hint", {}, `Only its first ${plural(completion.tokens.length, "token")} were recorded.`));
  found.recolour = () => {
    box.classList.toggle("masks", colours.mode === "mask");
    spans.forEach((span, place) => (span.style.backgroundColor = colourOf(completion, place)));
  };
  found.recolour();
  return found;
}

function modePicker(changed) {
  const note = el("span.hint", {}, MODES[colours.mode][1]);
  const buttons = Object.entries(MODES).map(([mode, [label]]) =>
    el("button", { "data-mode": mode, "aria-pressed": String(mode === colours.mode), onclick: (event) => {
      colours.mode = mode;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget));
      note.textContent = MODES[mode][1];
      changed();
    } }, label)); // prettier-ignore
  return el("div.modes", { role: "group", "aria-label": "Colour tokens by" }, el("span", {}, "Colour by "), buttons, note);
}

// A conversation's messages.
function turns(messages) {
  return el(
    "div.turns",
    {},
    messages.map((message) =>
      el(
        "div.turn",
        { "data-role": message.role || "" },
        el("div.role", {}, message.role || "?", message.name && ` · ${message.name}`),
        messageText(message) && el("div.text", {}, messageText(message)),
        Array.isArray(message.tool_calls) && message.tool_calls.map((call) => el("pre.call", {}, callText(call))),
      ),
    ),
  );
}

// An agent's session: its answers in lines, with a list inside a list where several go on from the same one.
function sessionTree(session) {
  const after = new Map([[null, []]]);
  session.forEach((turn, number) => {
    after.set(number, []);
    after.get(turn.after).push(number);
  });
  const list = (begun) => {
    const lines = [];
    let next = begun;
    while (next.length === 1) {
      lines.push(el("li", {}, answer(session[next[0]], next[0])));
      next = after.get(next[0]);
    }
    return el("ol.session", {}, lines, next.map((number) => el("li", {}, list([number]))));
  };
  return list(after.get(null));
}

function answer(turn, number) {
  const calls = turn.reply.flatMap((message) => (Array.isArray(message.tool_calls) ? message.tool_calls : []));
  const names = calls.map((call) => (call && call.function && call.function.name) || "?");
  const said = turn.reply.map((message) => messageText(message)).join(" ");
  const facts = [`answer ${number + 1}`, plural(turn.tokens ?? 0, "token"), `${turn.prompt_tokens ?? "–"} read`, `${fmt(turn.seconds)} s`, `at ${fmt(turn.began)} s`, turn.finish, ...names.map((name) => `calls ${name}`), !turn.trained && "not trained", !names.length && short(said, 60)]; // prettier-ignore
  return el("details", {}, el("summary", {}, facts.filter(Boolean).join(" · ")), turns([...turn.messages, ...turn.reply]));
}

function callText(call) {
  const made = (call && call.function) || call || {};
  const given = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments ?? {});
  return `${made.name ?? "?"}(${given})`;
}
