// What a session measures of its calls: marks among the steps, and names and bytes of the steps between them.
#include <string.h>

#include "runtime/engine.h"

enum { NO_STEP = 255 };

void k3_session_measure(struct k3_session *s, const struct k3_measure *measure) {
  s->measure = *measure;
  s->measured = false;
}

bool k3_measure_takes(const struct k3_session *s, const char *step) {
  return !s->measure.only_step || strcmp(s->measure.only_step, step) == 0;
}

static bool is_measuring(const struct k3_session *s) {
  return s->measure.calls || s->measure.steps;
}

// The next mark, which ends the step `step`.
static enum k3_status mark(struct k3_session *s, size_t step, struct k3_error *err) {
  K3_TRY(k3_grow(&s->mark_steps, &s->mark_steps_capacity, s->n_marks + 1, 1, err));
  K3_TRY(s->engine->backend->ops->mark(s->exec, s->n_marks, err));
  s->mark_steps[s->n_marks++] = (unsigned char)step;
  return K3_OK;
}

enum k3_status k3_measure_begin(struct k3_session *s, struct k3_error *err) {
  s->n_marks = 0;
  s->n_steps = 0;
  s->measured = false;
  return is_measuring(s) ? mark(s, NO_STEP, err) : K3_OK;
}

enum k3_status k3_measure_step(struct k3_session *s, const char *step, uint64_t weight_nbytes, uint64_t activation_nbytes, struct k3_error *err) {
  size_t i = 0;
  if (!is_measuring(s))
    return K3_OK;
  while (i < s->n_steps && strcmp(s->steps[i].step, step) != 0)
    i++;
  if (i == s->n_steps)
    s->steps[s->n_steps++] = (struct k3_step_time){.step = step};
  s->steps[i].n_calls++;
  s->steps[i].weight_nbytes += weight_nbytes;
  s->steps[i].activation_nbytes += activation_nbytes;
  return s->measure.steps ? mark(s, i, err) : K3_OK;
}

enum k3_status k3_measure_end(struct k3_session *s, struct k3_error *err) {
  if (!is_measuring(s))
    return K3_OK;
  if (!s->measure.steps)  // else the last step's mark is the end
    K3_TRY(mark(s, NO_STEP, err));
  s->measured = true;
  return K3_OK;
}

enum k3_status k3_session_times(struct k3_session *s, struct k3_call_time *times, struct k3_error *err) {
  const struct k3_backend_ops *ops = s->engine->backend->ops;
  *times = (struct k3_call_time){0};
  if (!s->measured)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "an append or a draft after k3_session_measure", "nothing was measured");
  for (size_t i = 0; i < s->n_steps; i++)
    s->steps[i].seconds = 0;
  for (size_t i = 1; i < s->n_marks; i++) {
    double seconds;
    K3_TRY(ops->elapsed(s->exec, i - 1, i, &seconds, err));
    times->seconds += seconds;
    if (s->mark_steps[i] != NO_STEP)
      s->steps[s->mark_steps[i]].seconds += seconds;
  }
  times->steps = s->steps;
  times->n_steps = s->n_steps;
  return K3_OK;
}

enum k3_status k3_session_bandwidth(struct k3_session *s, double *bytes_per_second, struct k3_error *err) {
  return s->engine->backend->ops->bandwidth(s->exec, bytes_per_second, err);
}
