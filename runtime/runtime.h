// The public C API: drafts with a packed Kimi K3 DSpark drafter, embedded in a serving engine. Designed for an engine that keeps its states on a
// GPU: every buffer names its memory, every call takes a stream, and cache, taps, embedding and head stay the caller's when it has them.
//
//   k3_engine_open      image -> weights on a backend; read-only afterwards, shared by any number of sessions and threads
//   k3_session_create   workspace and threads of one caller; all memory of a step is taken here, none later
//   k3_session_append   target states of new tokens -> rows of the paged latent cache, all layers at once
//   k3_session_draft    anchors -> T drafted tokens per request, with logits and confidences
//
// Errors: calls return K3_OK or fill *err (base/error.h; may be NULL). After a failed append or draft the outputs and the cache rows it would have
// written are unspecified; engine, session and all other rows are as before. Threads: one call at a time per session; sessions of one engine are
// independent; with several ranks an engine has one session at a time, all ranks make the same calls in the same order, each on a cache of its own,
// and a failure of one ends the others' calls with K3_COMM. Ownership: a create or open gives a handle that its free takes back (NULL is a no-op);
// everything else is borrowed for the duration of the call. Letters in shapes: H hidden, Ht target hidden, A taps, L layers, E cached row (latent
// rank + rotary width), V vocabulary, T block.
#ifndef K3_RUNTIME_RUNTIME_H
#define K3_RUNTIME_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/api.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/progress.h"

enum k3_memory { K3_MEMORY_HOST, K3_MEMORY_DEVICE };

// A row-major matrix that the caller owns. data NULL: absent. Aligned to its element size.
struct k3_array {
  void *data;
  enum k3_memory memory;  // must be what the backend works on (k3_engine_info), unless a parameter says otherwise
  enum k3_dtype dtype;
  uint64_t row_nbytes;  // distance of rows; 0: rows stand next to each other
};

struct k3_engine_options {  // all zero is a good start
  const char *backend;      // "cpu" (also NULL), or "cuda": K3_UNSUPPORTED with what is missing where plug-in, driver or device are
  int device;               // number of the GPU
  int tp_rank, tp_size;     // tensor parallel; size 0 means 1. The image is whole, or a folder that `convert --tp` wrote for so many ranks
  struct k3_comm *comm;     // this rank's communicator (runtime/comm.h), which must outlive the engine; NULL with one rank
  uint64_t block_width;     // T; 0: the image's. Another one changes every prediction, since a block attends to itself
  // Embedding and head of the target, used instead of the image's: [V, H] BF16, F16 or F32. They must outlive the engine.
  struct k3_array embed_tokens, lm_head;
  bool check_digests;            // check every byte of the image against its digests, not only header, manifest and tables
  struct k3_progress *progress;  // of loading; NULL: nobody watches
};

struct k3_engine_info {
  uint64_t hidden_size, target_hidden_size, n_taps, n_layers, row_width, latent_rank, vocab_size, max_positions, mask_token_id;
  uint64_t block_width, image_block_width;       // T in use, and the one the image was made for
  enum k3_memory memory;                         // where arrays and caches must lie
  enum k3_dtype activation_dtype;                // F32 or BF16: also the natural dtype of the cache
  bool has_embedding, has_head, has_confidence;  // without embedding or head a draft is refused
  uint64_t context_nbytes, draft_nbytes;         // weight bytes that one append and one draft read
  // How long opening took: starting the backend (a device's context and libraries), then bringing the weights to its memory (none on a CPU).
  double start_seconds, load_seconds;
  uint64_t load_nbytes;
  unsigned load_reads;  // reads that were under way at a time
  char identity[65];    // the image's seal, hex
};

// Opens an image: maps it, checks header, manifest and seal (IMG01, IMG02, IMG03), binds the weights. A tensor that is missing or has another shape
// than the manifest's model gives IMG01. NULL and *err on failure.
struct k3_engine;
K3_API struct k3_engine *k3_engine_open(const char *image_path, const struct k3_engine_options *options, struct k3_error *err);
K3_API void k3_engine_free(struct k3_engine *engine);  // after its sessions
K3_API const struct k3_engine_info *k3_engine_info(const struct k3_engine *engine);

// For callers without an allocator of their own: memory that arrays and caches may lie in (k3_engine_info.memory), zeroed, and copies between it and
// the host. A read waits for the calls that were made before.
K3_API enum k3_status k3_memory_create(struct k3_engine *engine, size_t nbytes, void **memory, struct k3_error *err);
K3_API void k3_memory_free(struct k3_engine *engine, void *memory);  // NULL is a no-op
K3_API enum k3_status k3_memory_write(struct k3_engine *engine, void *dst, const void *host_src, size_t nbytes, struct k3_error *err);
K3_API enum k3_status k3_memory_read(struct k3_engine *engine, void *host_dst, const void *src, size_t nbytes, struct k3_error *err);

// A paged latent cache, described by its owner; one row per token and layer: latent values, then the rotated key, E elements.
//   address of layer i, slot s: layers[i] + (s / block_size) * block_nbytes + (s % block_size) * row_nbytes
struct k3_cache {
  enum k3_memory memory;
  enum k3_dtype dtype;  // F32, BF16, F8_E4M3, F8_E5M2; all layers alike
  void *const *layers;  // [L] base addresses (the list itself is host memory)
  const float *scales;  // [L] host, FP8 only: stored = saturate(value / scale), read = stored * scale; NULL: 1
  uint64_t n_blocks, block_size, block_nbytes, row_nbytes;
};
// For callers without a cache of their own: fills *cache with memory of the backend, rows next to each other, zeroed. `scales` is copied. On failure
// *cache is zeroed and needs no free.
K3_API enum k3_status k3_cache_create(struct k3_engine *engine, enum k3_dtype dtype, uint64_t n_blocks, uint64_t block_size, const float *scales,
                                      struct k3_cache *cache, struct k3_error *err);
K3_API void k3_cache_free(struct k3_engine *engine, struct k3_cache *cache);  // a zeroed one is a no-op

struct k3_session_options {
  uint64_t max_requests;         // per draft
  uint64_t max_context_rows;     // rows of one pass of append (more are split); 0: 256
  uint64_t max_keys;             // longest sequence, m + T; 0: the model's limit
  int n_threads;                 // CPU; 0: one per CPU this process may run on. Results do not depend on it
  struct k3_progress *progress;  // counts weight bytes read by each call; NULL: nobody watches
};
struct k3_session;
K3_API struct k3_session *k3_session_create(struct k3_engine *engine, const struct k3_session_options *options, struct k3_error *err);
K3_API void k3_session_free(struct k3_session *session);
// How sums over the ranks are completed, and why so: "none" with one rank; "host" by the communicator; on GPUs "fused", "one-shot" or "two-shot" in
// one kernel with the norm, or "explicit" as an all-reduce before it. Texts live as long as the session.
K3_API void k3_session_sums(const struct k3_session *session, const char **how, const char **why);

struct k3_context {
  uint64_t n_rows;              // n; 0 is fine
  const struct k3_array *taps;  // one array [n, A * Ht], or A arrays [n, Ht] in ascending tap order; BF16 or F32
  uint64_t n_tap_arrays;        // 1 or A
  const int64_t *positions;     // [n] absolute positions, same memory as the taps
  const int64_t *slots;         // [n] cache slot of each row, or L such lists; -1: computed and dropped
  uint64_t slots_layer_stride;  // elements from one layer's list to the next; 0: one list for all
  struct k3_array states;       // out, optional: [n, H] F32, the combined taps
  struct k3_array rows;         // out, optional: [L, n, E] F32 (rows of all layers at row_nbytes), the rows as they are before the cache rounds them
};
// Positions at or above the limit are clamped to limit - 1. A position below 0 and a slot beyond the cache are K3_BAD_ARGUMENT, and so are in a draft
// an anchor outside the model's limit, more keys than the session has room for, and a block table without a block of the cache for a position below m
// + T. Where the host does not see them, on a device, nothing is written for them, and it is told when the steps are done: by the call itself, or
// with a stream of the caller by the session's next call.
//   stream  NULL on a CPU, and on a device when the call is to be done when it returns; else the stream that orders it
K3_API enum k3_status k3_session_append(struct k3_session *session, const struct k3_cache *cache, const struct k3_context *context, void *stream,
                                        struct k3_error *err);

struct k3_draft {
  uint64_t n_requests;              // B; 0 is fine
  const int64_t *anchor_ids;        // [B] the newly sampled token; clamped into 0 .. V-1
  const int64_t *anchor_positions;  // [B] m: its position; rows 0 .. m-1 of the request are in the cache
  const int32_t *block_tables;      // [B, max_blocks] cache blocks of each request in order; they cover positions 0 .. m+T-1, and the rows from m
  uint64_t max_blocks;              // on are overwritten as scratch
  const int64_t *previous_ids;      // optional [B, T]: slot k > 0 is conditioned on [k - 1] instead of on its own draft
  // Out, each optional (data NULL). Rows b * T + k; row_nbytes applies to the last dimension's rows.
  struct k3_array draft_ids;            // [B, T] I64, dense; ties go to the lowest id
  struct k3_array confidence;           // [B, T] F32, dense: 0 .. 1; refused without a confidence head
  struct k3_array hidden;               // [B * T, H] F32, after the final norm
  struct k3_array base_logits, logits;  // [B * T, V] F32, without and with the Markov bias
};
K3_API enum k3_status k3_session_draft(struct k3_session *session, const struct k3_cache *cache, const struct k3_draft *draft, void *stream,
                                       struct k3_error *err);

// Measurements. On a device the times are taken in the stream, between the steps themselves: what the host does beside is not in them.
struct k3_measure {       // all zero: nothing is measured, as in a new session
  bool calls;             // the time of each append and draft
  bool steps;             // the time of each of its steps too, between which a device then waits
  bool cold;              // before each call a device's caches are overwritten, outside the time; nothing happens on a CPU
  const char *only_step;  // calls take this step alone, on what earlier calls left, and their outputs are unspecified; NULL: all. Outlives its use
};
struct k3_step_time {  // all steps of one name in one call
  const char *step;
  uint64_t n_calls, weight_nbytes, activation_nbytes;  // what they read of the weights, and their inputs and outputs; rows of the cache not counted
  double seconds;                                      // 0 when steps are not timed
};
struct k3_call_time {
  double seconds;
  const struct k3_step_time *steps;  // the session's, until its next call
  size_t n_steps;
};
// What the following calls measure. Replaces what was set before.
K3_API void k3_session_measure(struct k3_session *session, const struct k3_measure *measure);
// The times of the newest append or draft that was measured; waits for it. K3_BAD_ARGUMENT when there is none.
K3_API enum k3_status k3_session_times(struct k3_session *session, struct k3_call_time *times, struct k3_error *err);
// What the memory gives, measured now: of a device a copy within it, read and written bytes both counted; of a CPU a plain read by the session's
// threads.
K3_API enum k3_status k3_session_bandwidth(struct k3_session *session, double *bytes_per_second, struct k3_error *err);

#endif
