// The model of model.py once more, for the page. A test holds both against each other.
"use strict";

const Prediction = (() => {
  const GRADIENT_BYTES = 4;

  // The binary logarithm, rounded up.
  const levels = (members) => 32 - Math.clz32(members - 1);

  function allReduce(setup, size, gpus) {
    if (gpus === 1) return 0;
    const nodes = Math.max(1, Math.floor(gpus / setup.gpusPerNode));
    const within = levels(Math.floor(gpus / nodes)) * setup.inner.latency;
    const across = levels(nodes) * setup.between.latency;
    let bandwidth = Math.min(setup.inner.bandwidth, setup.between.bandwidth);
    if (nodes === 1) bandwidth = setup.inner.bandwidth;
    if (nodes === gpus) bandwidth = setup.between.bandwidth;
    const sent = ((2 * (gpus - 1)) / gpus) * size;
    return setup.start + 2 * (within + across) + sent / bandwidth;
  }

  // A network's gradients are pairs: parameters, and the multiply-adds of backward that are done when they are there.
  function transfers(setup, backward, gpus) {
    const gradients = setup.network.gradients;
    const whole = gradients.at(-1)[1];
    const found = [];
    let end = 0;
    let size = 0;
    let limit = setup.firstBucket;
    for (const [index, [parameters, done]] of gradients.entries()) {
      size += parameters * GRADIENT_BYTES;
      if (size >= limit || index === gradients.length - 1) {
        const start = Math.max((backward * done) / whole, end);
        end = start + allReduce(setup, size, gpus);
        found.push({ start, end });
        size = 0;
        limit = setup.bucket;
      }
    }
    return found;
  }

  const kernelsOf = (setup) => setup.batch * setup.sampleSeconds;
  const launchesOf = (setup) => setup.network.operators * setup.launchSeconds;
  const compute = (setup) => Math.max(kernelsOf(setup), launchesOf(setup));
  const slowestKernels = (setup, gpus) => kernelsOf(setup) * (1 + setup.speedSpread * expectedMaximum(gpus));
  const slowestCompute = (setup, gpus) => Math.max(slowestKernels(setup, gpus), launchesOf(setup));

  function expectedMaximum(count) {
    if (count === 1) return 0;
    const above = 1 - (count - 0.375) / (count + 0.25);
    const t = Math.sqrt(-2 * Math.log(above));
    const numerator = 2.515517 + t * (0.802853 + t * 0.010328);
    const denominator = 1 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    return t - numerator / denominator;
  }

  function step(setup, gpus) {
    if (gpus === 1) return compute(setup);
    const kernels = slowestKernels(setup, gpus);
    const slowest = slowestCompute(setup, gpus);
    const backward = slowest * setup.backwardShare;
    let hidden = 0;
    for (const { start, end } of transfers(setup, backward, gpus)) {
      hidden += Math.min(end, backward) - Math.min(start, backward);
    }
    const hiddenKernels = (hidden * kernels) / slowest;
    const slowed = Math.max(kernels * setup.backwardShare + setup.contention * hiddenKernels, backward);
    const last = transfers(setup, slowed, gpus).at(-1);
    return slowest - backward + Math.max(slowed, last.end);
  }

  // What a step consists of, in seconds.
  function parts(setup, gpus) {
    const alone = compute(setup);
    const uneven = slowestCompute(setup, gpus);
    const withNetwork = step({ ...setup, contention: 0 }, gpus);
    const whole = step(setup, gpus);
    return {
      compute: alone,
      slowest: uneven - alone,
      exposed: withNetwork - uneven,
      contention: Math.max(0, whole - withNetwork),
    };
  }

  const weakEfficiency = (setup, gpus) => compute(setup) / step(setup, gpus);

  function speedUp(setup, globalBatch, gpus) {
    const alone = compute({ ...setup, batch: globalBatch });
    return alone / step({ ...setup, batch: globalBatch / gpus }, gpus);
  }

  function paysFrom(setup, gpus, efficiency, most = 2 ** 24) {
    for (let globalBatch = gpus; globalBatch <= most; globalBatch *= 2) {
      if (speedUp(setup, globalBatch, gpus) > efficiency * gpus) return globalBatch;
    }
    return null;
  }

  return { allReduce, step, parts, weakEfficiency, speedUp, paysFrom };
})();
