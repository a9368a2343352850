// The sliders of the prediction, the two pictures and the table that follow them.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const field = (name) => document.getElementById(name);
  const COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
  const SHOWN = [2, 8, 64, 512];
  const PARTS = [
    ["compute", "compute"],
    ["slowest", "waiting for the slowest GPU"],
    ["contention", "compute slowed by all-reduces"],
    ["exposed", "all-reduces that backward does not hide"],
  ];

  const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
  const samples = (count) => (count === null ? "–" : count.toLocaleString("en"));
  const gigabits = () => Math.round(2 ** Number(field("network").value) * 100) / 100;
  const perGpu = () => Math.round(2 ** Number(field("batch").value));
  const inAll = () => Math.round(2 ** Number(field("global").value));

  function milliseconds(seconds) {
    const value = 1000 * seconds;
    return `${value < 10 ? value.toPrecision(2) : Math.round(value).toLocaleString("en")} ms`;
  }

  function fillSelect(name, texts) {
    for (const [value, text] of texts) field(name).add(new Option(text, value));
  }

  // The controls begin where the command's flags are.
  function begin() {
    fillSelect("model", Object.keys(data.networks).map((name) => [name, name]));
    fillSelect("gpu", Object.entries(data.gpus).map(([key, gpu]) => [key, gpu.name]));
    fillSelect("node", data.nodes.map((size) => [size, size]));
    fillSelect("inner", Object.entries(data.inner).map(([key, link]) => [key, link.name]));
    field("batch").min = data.start.batch % 1; // so that the slider can stand at any batch
    for (const [name, value] of Object.entries(data.start)) field(name).value = value;
  }

  function readSetup() {
    const network = data.networks[field("model").value];
    return {
      network,
      batch: perGpu(),
      sampleSeconds: network.timesResnet50 / data.gpus[field("gpu").value].rate,
      launchSeconds: Number(field("launch").value) * 1e-6,
      gpusPerNode: Number(field("node").value),
      inner: data.inner[field("inner").value],
      between: { latency: Number(field("latency").value) * 1e-6, bandwidth: gigabits() * data.bytesPerGigabit },
      start: data.allReduceStart,
      backwardShare: data.backwardShare,
      bucket: data.bucket,
      firstBucket: data.firstBucket,
      speedSpread: Number(field("spread").value) / 100,
      contention: Number(field("contention").value) / 100,
    };
  }

  function say(name, text) {
    document.querySelector(`output[for="${name}"]`).textContent = text;
    field(name).setAttribute("aria-valuetext", text);
  }

  function sayValues() {
    say("network", `${gigabits().toLocaleString("en")} Gbit/s`);
    say("batch", samples(perGpu()));
    say("global", samples(inAll()));
    say("latency", `${field("latency").value} µs`);
    say("launch", `${field("launch").value} µs`);
    say("spread", `${field("spread").value} %`);
    say("contention", `${field("contention").value} %`);
  }

  // A line of the picture: a dot for each number of GPUs, and its name beside the last one.
  function line(kind, values, x, y) {
    const points = values.map(([gpus, share]) => `${x(gpus)},${y(share)}`);
    const dots = values.map(([gpus, share]) => {
      const title = `${gpus} GPUs, ${kind} scaling: ${percent(share, 1)}`;
      return `<circle cx="${x(gpus)}" cy="${y(share)}" r="4"><title>${title}</title></circle>`;
    });
    return `<g class="${kind}"><polyline points="${points.join(" ")}"/>${dots.join("")}</g>`;
  }

  function drawEfficiency(setup) {
    const picture = field("picture");
    const width = Math.max(300, picture.parentElement.clientWidth);
    const height = width < 500 ? 200 : 300;
    const [left, right, top, bottom] = [48, 12, 12, 44];
    const x = (gpus) => left + (Math.log2(gpus) / 9) * (width - left - right);
    const y = (share) => top + (1 - share) * (height - top - bottom);
    const weak = COUNTS.map((gpus) => [gpus, Prediction.weakEfficiency(setup, gpus)]);
    const split = COUNTS.filter((gpus) => gpus <= inAll());
    const strong = split.map((gpus) => [gpus, Prediction.speedUp(setup, inAll(), gpus) / gpus]);
    const across = [0, 0.25, 0.5, 0.75, 1].map(
      (share) =>
        `<line x1="${left}" x2="${width - right}" y1="${y(share)}" y2="${y(share)}"/>` +
        `<text x="${left - 8}" y="${y(share) + 4}" text-anchor="end">${percent(share)}</text>`,
    );
    const along = COUNTS.map(
      (gpus) => `<text x="${x(gpus)}" y="${height - bottom + 20}" text-anchor="middle">${gpus}</text>`,
    );
    const name = `<text x="${(left + width) / 2}" y="${height - 4}" text-anchor="middle">GPUs</text>`;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.innerHTML = `${across.join("")}${along.join("")}${name}${line("strong", strong, x, y)}${line("weak", weak, x, y)}`;
    field("weak").textContent = `weak scaling: ${samples(perGpu())} samples for each GPU`;
    field("strong").textContent = `strong scaling: ${samples(inAll())} samples in all`;
  }

  function drawParts(setup) {
    const rows = [1, ...SHOWN].map((gpus) => {
      const parts = Prediction.parts(setup, gpus);
      return { gpus, parts, whole: Object.values(parts).reduce((sum, part) => sum + part, 0) };
    });
    const longest = Math.max(...rows.map((row) => row.whole));
    const bars = rows.map(({ gpus, parts, whole }) => {
      const pieces = PARTS.map(([kind, name]) => {
        const title = `${name}: ${milliseconds(parts[kind])}`;
        return `<i class="${kind}" style="width:${(100 * parts[kind]) / longest}%" title="${title}"></i>`;
      });
      const count = gpus === 1 ? "1 GPU" : `${gpus} GPUs`;
      return `<div><b>${count}</b><span>${pieces.join("")}</span><em>${milliseconds(whole)}</em></div>`;
    });
    field("parts").innerHTML = bars.join("");
  }

  function fillTable(setup) {
    const rows = SHOWN.map((gpus) => {
      const batches = [1 / gpus, 0.5, 0.9].map((share) =>
        samples(Prediction.paysFrom(setup, gpus, share)),
      );
      return `<tr><td>${gpus}</td>${batches.map((batch) => `<td>${batch}</td>`).join("")}</tr>`;
    });
    field("pays").innerHTML = rows.join("");
  }

  function update() {
    const setup = readSetup();
    sayValues();
    drawEfficiency(setup);
    drawParts(setup);
    fillTable(setup);
  }

  begin();
  document.querySelector("form").addEventListener("input", update);
  window.addEventListener("resize", update);
  update();
})();
