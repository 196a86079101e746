// Router, gated MLPs and experts of the decoder layers.
#include <math.h>

#include "runtime/cpu/moe.h"

// ---- router ----

struct route {
  struct k3_exec *exec;
  const struct k3_route *p;
};

static float choice(const struct k3_route *p, const float *scores, uint64_t e) {
  return scores[e] + k3_load_float(p->bias->dtype, p->bias->data, e);
}

// Sum of the two best choices of a group.
static float group_score(const struct k3_route *p, const float *scores, uint64_t group, uint64_t n_in_group) {
  float best = -INFINITY, second = -INFINITY;
  for (uint64_t e = group * n_in_group; e < (group + 1) * n_in_group; e++) {
    float c = choice(p, scores, e);
    second = c > best ? best : fmaxf(second, c);
    best = fmaxf(best, c);
  }
  return best + second;
}

// Whether a group is among the chosen ones: fewer than n_active_groups others come before it.
static bool group_stays(const struct k3_route *p, const float *scores, uint64_t group, uint64_t n_in_group) {
  const float own = group_score(p, scores, group, n_in_group);
  uint64_t n_before = 0;
  for (uint64_t g = 0; g < p->n_groups; g++) {
    float other = group_score(p, scores, g, n_in_group);
    n_before += other > own || (other == own && g < group);
  }
  return n_before < p->n_active_groups;
}

static enum k3_status route_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  const struct route *c = ctx;
  const struct k3_route *p = c->p;
  const uint64_t X = p->gate->n_rows, n_in_group = X / p->n_groups;
  float *scores = p->logits + row * X, *choices = k3_cpu_scratch(c->exec, worker), sum = 0;
  for (uint64_t e = 0; e < X; e++)
    scores[e] = 1 / (1 + expf(-scores[e]));
  for (uint64_t g = 0; g < p->n_groups; g++) {
    const bool stays = p->n_active_groups == p->n_groups || group_stays(p, scores, g, n_in_group);
    for (uint64_t e = g * n_in_group; e < (g + 1) * n_in_group; e++)
      choices[e] = stays ? choice(p, scores, e) : -INFINITY;  // not 0: choices may be negative
  }
  for (uint64_t k = 0; k < p->n_active; k++) {
    uint64_t best = X;
    for (uint64_t e = 0; e < X; e++) {
      if (choices[e] > (best < X ? choices[best] : -INFINITY))
        best = e;
    }
    if (best == X)
      return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, p->name, "finite router scores", "row %llu has no %llu experts to choose from",
                     (unsigned long long)row, (unsigned long long)p->n_active);
    p->experts[row * p->n_active + k] = (int32_t)best;
    p->weights[row * p->n_active + k] = scores[best];
    sum += scores[best];
    choices[best] = -INFINITY;
  }
  const float factor = p->renormalise ? p->scale / (sum + 1e-20F) : p->scale;
  for (uint64_t k = 0; k < p->n_active; k++)
    p->weights[row * p->n_active + k] *= factor;
  return K3_OK;
}

enum k3_status k3_cpu_route(struct k3_exec *exec, const struct k3_route *p, struct k3_error *err) {
  struct route ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->gate, p->in, p->n_rows, p->logits, false, err));
  return k3_pool_run(exec->pool, p->n_rows, route_row, &ctx, err);
}

// ---- gated MLPs ----

struct gating {
  struct k3_exec *exec;
  struct k3_gate gate;
  uint64_t width;
  const float *gate_up;  // [n, 2 * width]
  float *gated;          // [n, width]
};

static enum k3_status gate_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct gating *c = ctx;
  const float *gates = c->gate_up + row * 2 * c->width, *ups = gates + c->width, limit = c->gate.limit;
  float *gated = c->gated + row * c->width;
  for (uint64_t i = 0; i < c->width; i++) {
    if (c->gate.activation == K3_ACTIVATION_SILU) {
      gated[i] = gates[i] / (1 + expf(-gates[i])) * ups[i];
      continue;
    }
    // The gate is cut above only.
    float g = gates[i] > limit ? limit : gates[i], u = ups[i] > limit ? limit : ups[i] < -limit ? -limit : ups[i];
    gated[i] = g / (1 + expf(-c->gate.alpha * g)) * (u + 1);
  }
  if (c->exec->bf16)
    k3_cpu_round_bf16(gated, c->width);
  return K3_OK;
}

// out = act(in * gate_up^T) * down^T, the last product not rounded.
static enum k3_status gated_mlp(struct k3_exec *exec, const struct k3_matrix *gate_up, const struct k3_matrix *down, const struct k3_gate *gate,
                                const float *in, uint64_t n, float *gate_up_rows, float *gated, float *out, struct k3_error *err) {
  struct gating ctx = {exec, *gate, down->n_cols, gate_up_rows, gated};
  K3_TRY(k3_cpu_matmul(exec, gate_up, in, n, gate_up_rows, exec->bf16, err));
  K3_TRY(k3_pool_run(exec->pool, n, gate_row, &ctx, err));
  return k3_cpu_matmul(exec, down, gated, n, out, false, err);
}

// The end of a branch: summed at once, left as a part, or simply stored.
static enum k3_status finish(struct k3_exec *exec, float *out, uint64_t n, bool reduce, bool partial, const char *name, struct k3_error *err) {
  if (reduce)
    K3_TRY(k3_cpu_all_reduce(exec, name, out, n, err));
  if (exec->bf16 && !partial)
    k3_cpu_round_bf16(out, n);
  return K3_OK;
}

enum k3_status k3_cpu_gated_mlp(struct k3_exec *exec, const struct k3_gated_mlp *p, struct k3_error *err) {
  K3_TRY(gated_mlp(exec, p->gate_up, p->down, &p->gate, p->in, p->n_rows, p->gate_up_rows, p->gated, p->out, err));
  return finish(exec, p->out, p->n_rows * p->down->n_rows, p->reduce, p->partial, p->name, err);
}

// Rows of expert e, gathered side by side; returns how many.
static uint64_t gather_rows(const struct k3_experts *p, uint64_t e, uint64_t width) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < p->n_rows * p->n_active; i++) {
    if ((uint64_t)p->experts[i] == e)
      memcpy((float *)p->gathered + n++ * width, (const float *)p->in + i / p->n_active * width, width * sizeof(float));
  }
  return n;
}

static void scatter_rows(const struct k3_experts *p, uint64_t e, uint64_t width) {
  const float *contribution = p->contribution;
  for (uint64_t i = 0; i < p->n_rows * p->n_active; i++) {
    if ((uint64_t)p->experts[i] != e)
      continue;
    float *restrict out = (float *)p->out + i / p->n_active * width;
    for (uint64_t c = 0; c < width; c++)
      out[c] += p->weights[i] * contribution[c];
    contribution += width;
  }
}

enum k3_status k3_cpu_experts(struct k3_exec *exec, const struct k3_experts *p, struct k3_error *err) {
  const uint64_t H = p->shared_down->n_rows;
  float *out = p->out;
  memset(out, 0, p->n_rows * H * sizeof *out);
  for (uint64_t e = 0; e < p->n_experts; e++) {
    const uint64_t n = gather_rows(p, e, H);
    if (n == 0)
      continue;
    K3_TRY(gated_mlp(exec, &p->gate_up[e], &p->down[e], &p->gate, p->gathered, n, p->gate_up_rows, p->gated, p->contribution, err));
    scatter_rows(p, e, H);
  }
  K3_TRY(gated_mlp(exec, p->shared_gate_up, p->shared_down, &p->gate, p->in, p->n_rows, p->gate_up_rows, p->gated, p->contribution, err));
  for (uint64_t i = 0; i < p->n_rows * H; i++)
    out[i] += ((const float *)p->contribution)[i];
  return finish(exec, out, p->n_rows * H, p->reduce, p->partial, p->name, err);
}
