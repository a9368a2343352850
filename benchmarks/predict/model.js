// The model of all_reduce.py and step.py once more, for the page. A test holds both against each other.
"use strict";

const Prediction = (() => {
  const GRADIENT_BYTES = 4;

  // How much of the bytes each member of a ring or tree sends.
  const volume = (members) => (2 * (members - 1)) / members;

  // The binary logarithm, rounded up.
  const levels = (members) => 32 - Math.clz32(members - 1);

  const nodesOf = (gpus, cluster) => Math.max(1, Math.floor(gpus / cluster.gpusPerNode));

  function narrowest(gpus, cluster) {
    const nodes = nodesOf(gpus, cluster);
    if (nodes === 1) return cluster.inner.bandwidth;
    if (nodes === gpus) return cluster.network.bandwidth;
    return Math.min(cluster.inner.bandwidth, cluster.network.bandwidth);
  }

  function ring(size, gpus, cluster) {
    const nodes = nodesOf(gpus, cluster);
    const waited = 2 * (gpus - nodes) * cluster.inner.latency + 2 * (nodes - 1) * cluster.network.latency;
    return waited + (volume(gpus) * size) / narrowest(gpus, cluster);
  }

  function tree(size, gpus, cluster) {
    const nodes = nodesOf(gpus, cluster);
    const inNode = levels(Math.floor(gpus / nodes)) * cluster.inner.latency;
    const between = levels(nodes) * cluster.network.latency;
    return 2 * (inNode + between) + (volume(gpus) * size) / narrowest(gpus, cluster);
  }

  function withinNodes(size, gpus, cluster) {
    const members = Math.floor(gpus / nodesOf(gpus, cluster));
    return 2 * (members - 1) * cluster.inner.latency + (volume(members) * size) / cluster.inner.bandwidth;
  }

  function twoTiers(messages, size, gpus, cluster) {
    const moved = (volume(nodesOf(gpus, cluster)) * size) / cluster.network.bandwidth;
    return withinNodes(size, gpus, cluster) + messages * cluster.network.latency + moved;
  }

  const twoRings = (size, gpus, cluster) => twoTiers(2 * (nodesOf(gpus, cluster) - 1), size, gpus, cluster);
  const ringAndTree = (size, gpus, cluster) => twoTiers(2 * levels(nodesOf(gpus, cluster)), size, gpus, cluster);

  function allReduce(size, gpus, cluster) {
    if (gpus === 1) return 0;
    const costs = [ring, tree, twoRings, ringAndTree].map((cost) => cost(size, gpus, cluster));
    return cluster.start + Math.min(...costs);
  }

  // A network's layers are pairs of parameters and multiply-adds, in the order of forward.
  function gradientsOf(network) {
    const whole = network.layers.reduce((sum, layer) => sum + layer[1], 0);
    let done = 0;
    const gradients = [];
    for (const [parameters, multiplyAdds] of [...network.layers].reverse()) {
      done += multiplyAdds;
      if (parameters) gradients.push({ size: parameters * GRADIENT_BYTES, share: done / whole });
    }
    return gradients;
  }

  function* whenFull(gradients, buckets, backward, gpus, cluster) {
    let end = 0;
    let size = 0;
    let limit = buckets.first;
    for (const [index, gradient] of gradients.entries()) {
      size += gradient.size;
      if (size >= limit || index === gradients.length - 1) {
        const start = Math.max(gradient.share * backward, end);
        end = start + allReduce(size, gpus, cluster);
        yield { start, end };
        size = 0;
        limit = buckets.size;
      }
    }
  }

  const transfers = (training, backward, gpus, cluster) => [
    ...whenFull(gradientsOf(training.network), training.buckets, backward, gpus, cluster),
  ];

  const kernelsOf = (training, batch) => batch * training.sampleSeconds;
  const launchesOf = (training) => training.network.operators * training.launchSeconds;
  const compute = (training, batch) => Math.max(kernelsOf(training, batch), launchesOf(training));

  const slowestKernels = (training, batch, gpus) =>
    kernelsOf(training, batch) * (1 + training.speedSpread * expectedMaximum(gpus));
  const slowestCompute = (training, batch, gpus) =>
    Math.max(slowestKernels(training, batch, gpus), launchesOf(training));

  function expectedMaximum(count) {
    if (count === 1) return 0;
    const above = 1 - (count - 0.375) / (count + 0.25);
    const t = Math.sqrt(-2 * Math.log(above));
    const numerator = 2.515517 + t * (0.802853 + t * 0.010328);
    const denominator = 1 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    return t - numerator / denominator;
  }

  function step(training, batch, gpus, cluster) {
    if (gpus === 1) return compute(training, batch);
    const kernels = slowestKernels(training, batch, gpus);
    const slowest = slowestCompute(training, batch, gpus);
    const backward = slowest * training.backwardShare;
    let hidden = 0;
    for (const { start, end } of transfers(training, backward, gpus, cluster)) {
      hidden += Math.min(end, backward) - Math.min(start, backward);
    }
    const hiddenKernels = (hidden * kernels) / slowest;
    const slowed = Math.max(kernels * training.backwardShare + training.contention * hiddenKernels, backward);
    const last = transfers(training, slowed, gpus, cluster).at(-1);
    return slowest - backward + Math.max(slowed, last.end);
  }

  // What a step consists of, in seconds.
  function parts(training, batch, gpus, cluster) {
    const alone = compute(training, batch);
    const uneven = slowestCompute(training, batch, gpus);
    const withNetwork = step({ ...training, contention: 0 }, batch, gpus, cluster);
    const whole = step(training, batch, gpus, cluster);
    return {
      compute: alone,
      slowest: uneven - alone,
      exposed: withNetwork - uneven,
      contention: Math.max(0, whole - withNetwork),
    };
  }

  const weakEfficiency = (training, batch, gpus, cluster) =>
    compute(training, batch) / step(training, batch, gpus, cluster);

  const speedUp = (training, globalBatch, gpus, cluster) =>
    compute(training, globalBatch) / step(training, globalBatch / gpus, gpus, cluster);

  function paysFrom(training, gpus, cluster, efficiency, most = 2 ** 24) {
    for (let globalBatch = gpus; globalBatch <= most; globalBatch *= 2) {
      if (speedUp(training, globalBatch, gpus, cluster) > efficiency * gpus) return globalBatch;
    }
    return null;
  }

  return { allReduce, step, parts, weakEfficiency, speedUp, paysFrom };
})();

if (typeof module !== "undefined") module.exports = Prediction;
