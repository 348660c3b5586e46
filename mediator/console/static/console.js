"use strict";
// Times are written as everywhere on these pages: UTC, 24 hours.
const utc = (at, from = 0, to = 19) => `${at.toISOString().slice(from, to).replace("T", " ")}Z`;

// What htmx and uPlot leave to do: live pages while somebody looks at them, and plots in the page's colours.

// A page says where its events come from (data-live); an event replaces the part of that name (data-event),
// or is put in front of it and pushes out the last of many (data-prepend: how many stay).
function follow(state) {
  let source = null;
  let seen = "";
  const say = (text) => { if (state.textContent !== text) state.textContent = text; };

  function open() {
    const url = new URL(state.dataset.live, location);
    if (seen) url.searchParams.set("after", seen);
    source = new EventSource(url);
    source.onopen = () => { say("Live."); recover(); };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) {
        // Either the service refused it, or a proxy says that there is no service.
        fetch(location, {method: "HEAD"}).then(({status}) => status > 501 ? retry() : say(
          "Not live: you are signed out, or the service has no room for another live page. Reload to try again."), retry);
      } else {
        say("Reconnecting…");
        lose();
      }
    };
    for (const part of document.querySelectorAll("[data-event]")) {
      source.addEventListener(part.dataset.event, (event) => {
        const many = Number(part.dataset.prepend);
        seen = event.lastEventId;
        htmx.swap(part, event.data, {swapStyle: many ? "afterbegin" : "innerHTML", swapDelay: 0, settleDelay: 0});
        while (many && part.childElementCount > many) part.lastElementChild.remove();
      });
    }
    source.addEventListener("sample", (event) => document.dispatchEvent(
      new CustomEvent("sample", {detail: JSON.parse(event.data)})));
  }

  function retry() {
    lose();
    say("Reconnecting…");
    source = null;
    setTimeout(look, 5000);
  }

  // Browsers allow few connections to one host, so a hidden page gives its own back.
  function look() {
    if (document.hidden && source) {
      source.close();
      source = null;
      say("Paused while the page is hidden.");
    } else if (!document.hidden && !source) {
      open();
    }
  }
  document.addEventListener("visibilitychange", look);
  look();
}

// A hidden page does not ask for its parts again, nor for one in which somebody fills in a field or selects rows.
document.addEventListener("htmx:beforeRequest", (event) => {
  const busy = "[hx-trigger^=every]:has(input:focus, tbody input:checked, details.confirm[open])";
  if (document.hidden || event.target.matches(busy)) event.preventDefault();
});

// The box in the head of a table selects all its rows.
document.addEventListener("change", ({target}) => {
  if (!target.matches("[data-all]")) return;
  for (const box of target.closest("table").querySelectorAll("tbody [type=checkbox]")) box.checked = target.checked;
});

// The samples of a range, [[at, …], [value, …], …] by the names of a plot's data-series. "seconds": how far the range
// goes back, which the axis shows however little is known of it.
async function plot(url) {
  const answer = await fetch(url);
  if (!answer.ok) return;
  const {kept, seconds, columns} = await answer.json();
  const figures = [...document.querySelectorAll("[data-series]")];
  const drawn = new Map();

  function rows(figure) {
    const factor = Number(figure.dataset.factor);
    const scaled = (column) => column.map((value) => value === null ? null : value * factor);
    return [columns.at, ...figure.dataset.series.split(" ").map((name) => scaled(columns[name]))];
  }

  const end = () => columns.at.at(-1) ?? Date.now() / 1000;
  const days = () => end() - (seconds ? end() - seconds : columns.at[0]) > 86400;
  const span = (_, low, high) => seconds ? [end() - seconds, end()] : [low, high];
  const tick = (at) => days() ? utc(new Date(at * 1000), 5, 16) : utc(new Date(at * 1000), 11, 16);
  // While nobody points at a plot, its legend has the latest values.
  const last = (chart) => chart.setLegend({idx: columns.at.length - 1});

  function draw(figure) {
    drawn.get(figure)?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line")}};
    const names = figure.dataset.series.split(" ");
    const options = {
      width: figure.clientWidth,
      height: 200,
      scales: {x: {time: true, range: span}, y: {range: (_, low, high) => [0, Math.max(high * 1.05, 1)]}},
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC"),
      series: [{value: (_, at) => at === null ? "" : utc(new Date(at * 1000), 11)}, ...names.map((name, index) => ({
        label: name.split(".").pop(),
        stroke: colour(`--c${names.length === 1 ? 2 : index % 4}`),
        dash: [[], [8, 4], [], [2, 4]][names.length === 1 ? 0 : index % 4],
        width: 1.5,
        points: {show: false},
        value: (_, value) => value === null ? "–" : String(Number(value.toPrecision(3))),
      }))],
      hooks: {setCursor: [(chart) => { if (chart.cursor.idx === null) last(chart); }], ready: [last]},
      axes: [{...axis, space: days() ? 90 : 50, values: (_, ticks) => ticks.map(tick)}, {...axis, size: 60, values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en", {notation: "compact"}))}],
    };
    drawn.set(figure, new uPlot(options, rows(figure), figure));
  }

  const drawAll = () => figures.forEach(draw);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const sizes = new ResizeObserver((entries) => entries.forEach(({target}) =>
    drawn.get(target)?.setSize({width: target.clientWidth, height: 200})));
  figures.forEach((figure) => sizes.observe(figure));
  if (seconds > 3600) return;
  document.addEventListener("sample", ({detail}) => {
    for (const [name, column] of Object.entries(columns)) {
      column.push(detail[name] ?? null);
      if (column.length > kept) column.shift();
    }
    for (const [figure, chart] of drawn) {
      chart.setData(rows(figure));
      last(chart);
    }
  });
}

// Links, commands, and secrets that are shown once: a button copies one, or selects it where no page may copy.
document.addEventListener("click", async ({target}) => {
  if (!target.matches("[data-copy]")) return;
  const said = document.querySelector("[data-copied]");
  const text = document.getElementById(target.dataset.copy);
  try {
    await navigator.clipboard.writeText(text.textContent);
    said.textContent = target.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(text);
    said.textContent = target.textContent = "Selected: copy it with the keyboard.";
  }
});

// When the service does not answer, the page says so and greys its numbers until it does.
let lostAt = null;
function lose() {
  lostAt ??= new Date();
  const gone = document.getElementById("gone");
  if (!gone) return;
  gone.hidden = false;
  gone.textContent = `The service does not answer since ${utc(lostAt)}. What stands here is older. Trying again…`;
  document.body.classList.add("stale");
}
function recover() {
  lostAt = null;
  const gone = document.getElementById("gone");
  if (gone) gone.hidden = true;
  document.body.classList.remove("stale");
}
document.addEventListener("htmx:sendError", lose);
document.addEventListener("htmx:timeout", lose);
document.addEventListener("htmx:responseError", ({detail}) => detail.xhr.status > 501 && lose());
document.addEventListener("htmx:afterOnLoad", ({detail}) => detail.xhr.status < 502 && recover());

addEventListener("DOMContentLoaded", () => {
  // Loading the page again leads on, and does not repeat what was done.
  const onward = document.querySelector("[data-replace]");
  if (onward) history.replaceState(null, "", onward.getAttribute("href"));
  const state = document.querySelector("[data-live]");
  if (state) follow(state);
  const plots = document.querySelector("[data-samples]");
  if (plots) plot(plots.dataset.samples);
});
