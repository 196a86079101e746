// The manifest: written, read back and written again; runs of shards; everything malformed; the check against the header.
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "build_image.h"
#include "formats/manifest.h"
#include "unit.h"

// ---- one of everything ----

static const char sha[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

static struct k3_manifest_source sources[] = {{"model-00001-of-00002.safetensors", 4096, "__source__.0", false, NULL},
                                              {"target.safetensors", 100, "__source__.1", true, sha}};
static struct k3_manifest_document documents[] = {{"config.json", "__source__.2"}};
static struct k3_manifest_shard qkv[] = {{1, "layers.0.kv_a.weight", 0, 4, 3}, {0, "layers.0.q_a.weight", 0, 0, 4}};
static struct k3_manifest_shard embed[] = {{0, "language_model.embed.weight", 1, 0, 16}};
static struct k3_manifest_tensor tensors[] = {{"model.layers.{i}.o_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
                                              {"model.layers.0.qkv.weight", K3_ROLE_CORE, K3_TP_REPLICATE, qkv, 2, 0},
                                              {"model.embed_tokens.weight", K3_ROLE_BORROWED, K3_TP_VOCAB, embed, 1, 0},
                                              {"model.confidence.*", K3_ROLE_OPTIONAL, K3_TP_COLUMN, NULL, 0, 0}};
static struct k3_manifest_linear linears[] = {
    {"model.layers.0.up", "nvfp4", 1, 16, true, NULL},     {"model.layers.0.down", "fp8-block", 128, 128, false, NULL},
    {"model.layers.10.up", "nvfp4", 1, 16, true, NULL},    {"model.layers.2.up", "nvfp4", 1, 16, false, NULL},
    {"model.layers.0.o", "fp8-tensor", 0, 0, false, NULL}, {"model.layers.9.up", "nvfp4", 1, 16, true, NULL}};
static struct k3_manifest_view_shard view_shards[] = {{0, "model.layers.0.qkv.weight", 4, 3}, {1, "model.layers.1.qkv.weight", 4, 3}};
static struct k3_manifest_view views[] = {{"model.context_kv_proj.weight", view_shards, 2}};
static struct k3_manifest_pair aliases[] = {{"norm", "final_norm"}, {"fc", "context_proj"}};
static struct k3_manifest_pair reductions[] = {{"model.layers.{i}.o_proj", "model.layers.{i}.norm"}};
static struct k3_manifest_pair dropped[] = {{"rotary.inv_freq", "recomputed"}};

static struct k3_manifest everything(void) {
  return (struct k3_manifest){.tool = "k3pack 1.2.3",
                              .recipe_name = "k3-dspark",
                              .recipe_sha256 = sha,
                              .family = "generic",
                              .root = "",
                              .image_root = "model.",
                              .aliases = aliases,
                              .n_aliases = 2,
                              .sources = sources,
                              .n_sources = 2,
                              .documents = documents,
                              .n_documents = 1,
                              .tensors = tensors,
                              .n_tensors = 4,
                              .linears = linears,
                              .n_linears = 6,
                              .views = views,
                              .n_views = 1,
                              .reductions = reductions,
                              .n_reductions = 1,
                              .dropped = dropped,
                              .n_dropped = 1,
                              .digests = true};
}

#define SHA "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

static const char everything_text[] =
    "{\"crc\":false,\"digests\":true,\"documents\":[{\"file\":\"config.json\",\"tensor\":\"__source__.2\"}],"
    "\"dropped\":[{\"tensor\":\"rotary.inv_freq\",\"why\":\"recomputed\"}],\"image_version\":1,"
    "\"linears\":[{\"block\":[128,128],\"modules\":[\"model.layers.0.down\"],\"scheme\":\"fp8-block\"},"
    "{\"modules\":[\"model.layers.0.o\"],\"scheme\":\"fp8-tensor\"},"
    "{\"group\":16,\"modules\":[\"model.layers.2.up\"],\"scheme\":\"nvfp4\",\"second_scale\":\"multiply\"},"
    "{\"group\":16,\"modules\":[\"model.layers.0.up\",\"model.layers.9.up\",\"model.layers.10.up\"],\"scheme\":\"nvfp4\",\"second_scale\":\"divide\"}"
    "],"
    "\"model\":{\"family\":\"generic\"},\"names\":{\"aliases\":{\"fc\":\"context_proj\",\"norm\":\"final_norm\"},\"image_root\":\"model.\",\"root\":"
    "\"\"},"
    "\"recipe\":{\"name\":\"k3-dspark\",\"sha256\":\"" SHA
    "\"},"
    "\"reductions\":[{\"norm\":\"model.layers.{i}.norm\",\"producer\":\"model.layers.{i}.o_proj\"}],"
    "\"sources\":[{\"file\":\"model-00001-of-00002.safetensors\",\"header\":\"__source__.0\",\"of\":\"source\",\"size\":4096},"
    "{\"file\":\"target.safetensors\",\"header\":\"__source__.1\",\"of\":\"target\",\"sha256\":\"" SHA
    "\",\"size\":100}],"
    "\"tensors\":[{\"name\":\"model.confidence.*\",\"role\":\"optional\",\"tp\":\"column\"},"
    "{\"name\":\"model.embed_tokens.weight\",\"role\":\"borrowed\",\"shards\":[{\"file\":1,\"id\":0,\"n_rows\":16,\"row\":0,"
    "\"source\":\"language_model.embed.weight\"}],\"tp\":\"vocab\"},"
    "{\"name\":\"model.layers.0.qkv.weight\",\"shards\":[{\"file\":0,\"id\":0,\"n_rows\":4,\"row\":0,\"source\":\"layers.0.q_a.weight\"},"
    "{\"file\":0,\"id\":1,\"n_rows\":3,\"row\":4,\"source\":\"layers.0.kv_a.weight\"}]},"
    "{\"name\":\"model.layers.{i}.o_proj.*\",\"tp\":\"row\"}],\"tool\":\"k3pack 1.2.3\","
    "\"views\":{\"model.context_kv_proj.weight\":[{\"id\":0,\"n_rows\":3,\"row\":4,\"tensor\":\"model.layers.0.qkv.weight\"},"
    "{\"id\":1,\"n_rows\":3,\"row\":4,\"tensor\":\"model.layers.1.qkv.weight\"}]}}";

static enum k3_status parse_n(const char *text, size_t n, struct k3_manifest *manifest, struct k3_error *err) {
  char *copy = malloc(n ? n : 1);
  memcpy(copy, text, n);
  if (err)
    *err = (struct k3_error){0};
  enum k3_status status = k3_manifest_parse(copy, n, "image", manifest, err);
  free(copy);
  return status;
}

static struct k3_manifest must_parse(const char *text) {
  struct k3_manifest manifest;
  struct k3_error err;
  if (parse_n(text, strlen(text), &manifest, &err) != K3_OK)
    fail_msg("refused: %s: %s", err.tensor, err.found);
  return manifest;
}

static void one_of_everything(void **state) {
  (void)state;
  struct k3_manifest written = everything();
  char *text = k3_manifest_to_json(&written, NULL);
  assert_string_equal(text, everything_text);
  k3_free(text);
  char padded[8192];
  snprintf(padded, sizeof padded, "%s%100s", everything_text, "");
  struct k3_manifest m = must_parse(padded);
  text = k3_manifest_to_json(&m, NULL);
  assert_string_equal(text, everything_text);
  k3_free(text);

  assert_string_equal(m.tool, "k3pack 1.2.3");
  assert_string_equal(m.recipe_name, "k3-dspark");
  assert_string_equal(m.recipe_sha256, sha);
  assert_string_equal(m.family, "generic");
  assert_string_equal(m.model_json, "{\"family\":\"generic\"}");
  assert_string_equal(m.root, "");
  assert_string_equal(m.image_root, "model.");
  assert_true(m.digests && !m.crc);
  assert_int_equal(m.n_aliases, 2);
  assert_string_equal(m.aliases[0].key, "fc");
  assert_string_equal(m.aliases[0].value, "context_proj");
  assert_int_equal(m.n_sources, 2);
  assert_string_equal(m.sources[1].file, "target.safetensors");
  assert_true(m.sources[1].of_target && !m.sources[0].of_target && m.sources[1].nbytes == 100 && !m.sources[0].sha256);
  assert_string_equal(m.sources[1].sha256, sha);
  assert_string_equal(m.sources[0].header_tensor, "__source__.0");
  assert_int_equal(m.n_documents, 1);
  assert_string_equal(m.documents[0].tensor, "__source__.2");
  assert_int_equal(m.n_tensors, 4);
  const struct k3_manifest_tensor *fused = k3_manifest_tensor_of(&m, "model.layers.0.qkv.weight");
  assert_non_null(fused);
  assert_int_equal(fused->n_shards, 2);
  assert_string_equal(fused->shards[1].source, "layers.0.kv_a.weight");
  assert_true(fused->shards[1].id == 1 && fused->shards[1].row == 4 && fused->shards[1].n_rows == 3 && fused->shards[1].file == 0);
  assert_null(k3_manifest_tensor_of(&m, "model.layers.1.qkv.weight"));
  assert_int_equal(m.n_reductions, 1);
  assert_string_equal(m.reductions[0].key, "model.layers.{i}.o_proj");
  assert_string_equal(m.dropped[0].value, "recomputed");
  k3_manifest_free(&m);
  k3_manifest_free(&m);  // an empty one is fine
}

static void lookups(void **state) {
  (void)state;
  struct k3_manifest m = must_parse(everything_text);
  const struct k3_manifest_linear *linear = k3_manifest_linear_of(&m, "model.layers.10.up");
  assert_non_null(linear);
  assert_string_equal(linear->scheme, "nvfp4");
  assert_true(linear->block_rows == 1 && linear->block_cols == 16 && linear->second_scale_divides);
  linear = k3_manifest_linear_of(&m, "model.layers.0.down");
  assert_true(linear && linear->block_rows == 128 && linear->block_cols == 128 && !linear->second_scale_divides);
  linear = k3_manifest_linear_of(&m, "model.layers.0.o");
  assert_true(linear && linear->block_rows == 0 && linear->block_cols == 0);
  assert_null(k3_manifest_linear_of(&m, "model.layers.0"));
  assert_non_null(k3_manifest_view_of(&m, "model.context_kv_proj.weight"));
  assert_null(k3_manifest_view_of(&m, "model.context_kv_proj"));
  static const struct {
    const char *name;
    enum k3_role role;
    enum k3_tp_rule tp;
  } roles[] = {{"model.embed_tokens.weight", K3_ROLE_BORROWED, K3_TP_VOCAB},     {"model.layers.0.o_proj.weight", K3_ROLE_CORE, K3_TP_ROW},
               {"model.layers.12.o_proj.weight_scale", K3_ROLE_CORE, K3_TP_ROW}, {"model.layers.x.o_proj.weight", K3_ROLE_CORE, K3_TP_REPLICATE},
               {"model.layers..o_proj.weight", K3_ROLE_CORE, K3_TP_REPLICATE},   {"model.layers.1.o_proj.a.b", K3_ROLE_CORE, K3_TP_REPLICATE},
               {"model.layers.1.o_proj", K3_ROLE_CORE, K3_TP_REPLICATE},         {"model.layers.1.o_proj.", K3_ROLE_CORE, K3_TP_REPLICATE},
               {"model.confidence.bias", K3_ROLE_OPTIONAL, K3_TP_COLUMN},        {"", K3_ROLE_CORE, K3_TP_REPLICATE}};
  for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
    enum k3_role role = K3_ROLE_OPTIONAL;
    enum k3_tp_rule tp = K3_TP_COLUMN;
    k3_manifest_role_of(&m, roles[i].name, &role, &tp);
    assert_int_equal(role, roles[i].role);
    assert_int_equal(tp, roles[i].tp);
  }
  k3_manifest_free(&m);
  struct k3_manifest empty = {0};
  assert_null(k3_manifest_view_of(&empty, "a"));
}

// The longest pattern counts.
static void patterns_of_different_length(void **state) {
  (void)state;
  struct k3_manifest m = must_parse(
      "{\"image_version\":1,\"tool\":\"\",\"digests\":true,\"crc\":false,\"recipe\":{\"name\":\"x\"},\"model\":{\"family\":\"generic\"},"
      "\"tensors\":[{\"name\":\"a.{i}.*\",\"tp\":\"row\"},{\"name\":\"a.{i}.weight\",\"tp\":\"column\"},{\"name\":\"a.7.weight\",\"tp\":\"vocab\"}]"
      "}");
  enum k3_role role;
  enum k3_tp_rule tp[3];
  k3_manifest_role_of(&m, "a.1.bias", &role, &tp[0]);
  k3_manifest_role_of(&m, "a.1.weight", &role, &tp[1]);
  k3_manifest_role_of(&m, "a.7.weight", &role, &tp[2]);
  assert_true(tp[0] == K3_TP_ROW && tp[1] == K3_TP_COLUMN && tp[2] == K3_TP_VOCAB);
  assert_true(m.n_sources == 0 && m.n_views == 0 && m.root[0] == '\0' && !m.recipe_sha256);
  k3_manifest_free(&m);
}

// The drafter's geometry is made from the struct, and read back into it.
static void the_model_object(void **state) {
  (void)state;
  struct k3_manifest written = everything();
  written.family = "k3-dspark";
  written.dspark = (struct k3_dspark_model){.hidden_size = 64,
                                            .target_hidden_size = 32,
                                            .n_taps = 2,
                                            .target_layer_ids = {1, 3},
                                            .target_n_layers = 4,
                                            .n_layers = 3,
                                            .n_heads = 4,
                                            .qk_nope_head_dim = 8,
                                            .qk_rope_head_dim = 4,
                                            .v_head_dim = 8,
                                            .q_lora_rank = 16,
                                            .kv_lora_rank = 12,
                                            .intermediate_size = 32,
                                            .vocab_size = 24,
                                            .markov_rank = 4,
                                            .block_width = 7,
                                            .mask_token_id = 23,
                                            .max_position_embeddings = 64,
                                            .rms_norm_eps = 1e-5,
                                            .logit_scale = 1,
                                            .rope = {.theta = 10000, .factor = 1, .beta_fast = 32, .beta_slow = 1, .mscale = 1},
                                            .target_stream = "prefix"};
  char *text = k3_manifest_to_json(&written, NULL), *again;
  struct k3_manifest m = must_parse(text);
  assert_string_equal(m.family, "k3-dspark");
  assert_int_equal(m.dspark.kv_lora_rank, 12);
  assert_int_equal(m.dspark.target_layer_ids[1], 3);
  again = k3_manifest_to_json(&m, NULL);
  assert_string_equal(text, again);
  k3_free(again);
  k3_manifest_free(&m);
  char *at = strstr(text, "\"mask_token_id\":23");
  at[17] = '9';  // 29 of 24
  struct k3_error err;
  assert_int_equal(parse_n(text, strlen(text), &m, &err), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(err.rule)->id, "IMG01");
  assert_string_equal(err.tensor, "mask_token_id");
  assert_int_equal(m.n_tensors, 0);
  k3_free(text);
  // Other families keep what they say, whatever it is.
  static const char odd[] =
      "{\"image_version\":1,\"tool\":\"\",\"digests\":true,\"crc\":false,\"recipe\":{\"name\":\"x\"},"
      "\"model\":{\"z\":[1,2.5,null,true,{\"b\":\"\\u0007\",\"a\":-3}],\"family\":\"new\"}}";
  m = must_parse(odd);
  assert_string_equal(m.model_json, "{\"family\":\"new\",\"z\":[1,2.5,null,true,{\"a\":-3,\"b\":\"\\u0007\"}]}");
  k3_manifest_free(&m);
}

// ---- runs ----

// Writes one tensor with these shards; the text of its list. Free with free.
static char *shards_text(struct k3_manifest_shard *shards, size_t n) {
  struct k3_manifest_tensor tensor = {"t", K3_ROLE_CORE, K3_TP_REPLICATE, shards, n, 0};
  struct k3_manifest m = everything();
  m.tensors = &tensor;
  m.n_tensors = 1;
  char *text = k3_manifest_to_json(&m, NULL);
  assert_non_null(text);
  // Whatever it is written as, it comes back, and is written as the same bytes again.
  struct k3_manifest back = must_parse(text);
  assert_int_equal(back.tensors[0].n_shards, n);
  char *again = k3_manifest_to_json(&back, NULL);
  assert_string_equal(text, again);
  for (size_t i = 0; i < n; i++) {
    size_t k = 0;
    while (k < n && (back.tensors[0].shards[k].row != shards[i].row || strcmp(back.tensors[0].shards[k].source, shards[i].source) != 0))
      k++;
    assert_true(k < n);
    assert_int_equal(back.tensors[0].shards[k].id, shards[i].id);
    assert_int_equal(back.tensors[0].shards[k].n_rows, shards[i].n_rows);
  }
  k3_manifest_free(&back);
  char *begin = strstr(text, "\"shards\":") + 9, *end = strstr(begin, "}],\"tool\"");
  char *list = strndup(begin, (size_t)(end - begin));
  k3_free(text);
  k3_free(again);
  return list;
}

static char names[10000][48];
static struct k3_manifest_shard many[10000];

// n shards named by the format with e = first, first + 1, ...; ids and rows from 0 in steps.
static void fill_run(size_t at, size_t stride, size_t n, const char *before, const char *after, unsigned first, uint64_t n_rows) {
  for (size_t i = 0; i < n; i++) {
    size_t k = at + i * stride;
    snprintf(names[k], sizeof names[k], "%s%u%s", before, first + (unsigned)i, after);
    many[k] = (struct k3_manifest_shard){k, names[k], 0, k * n_rows, n_rows};
  }
}

static void a_run_is_one_entry(void **state) {
  (void)state;
  fill_run(0, 1, 12, "e.", ".w", 3, 4);
  char *text = shards_text(many, 12);
  assert_string_equal(text, "[{\"each\":[\"e\",3,15],\"id\":[0,1],\"n_rows\":4,\"row\":[0,4],\"source\":\"e.{e}.w\"}]");
  free(text);
  text = shards_text(many, 8);
  assert_non_null(strstr(text, "[\"e\",3,11]"));
  free(text);
  text = shards_text(many, 7);  // shorter ones are listed, with their file
  assert_null(strstr(text, "each"));
  assert_non_null(strstr(text, "{\"file\":0,\"id\":6,\"n_rows\":4,\"row\":24,\"source\":\"e.9.w\"}"));
  free(text);
}

static void runs_that_take_turns(void **state) {
  (void)state;
  fill_run(0, 2, 896, "experts.", ".w1", 0, 2);
  fill_run(1, 2, 896, "experts.", ".w3", 0, 2);
  char *text = shards_text(many, 1792);
  assert_string_equal(text,
                      "[{\"each\":[\"e\",0,896],\"id\":[0,2],\"n_rows\":2,\"row\":[0,4],\"source\":\"experts.{e}.w1\"},"
                      "{\"each\":[\"e\",0,896],\"id\":[1,2],\"n_rows\":2,\"row\":[2,4],\"source\":\"experts.{e}.w3\"}]");
  free(text);
}

static void long_runs_are_cut(void **state) {
  (void)state;
  fill_run(0, 1, 10000, "e.", "", 95, 1);
  char *text = shards_text(many, 10000);
  assert_string_equal(text,
                      "[{\"each\":[\"e\",95,4191],\"id\":[0,1],\"n_rows\":1,\"row\":[0,1],\"source\":\"e.{e}\"},"
                      "{\"each\":[\"e\",4191,8287],\"id\":[4096,1],\"n_rows\":1,\"row\":[4096,1],\"source\":\"e.{e}\"},"
                      "{\"each\":[\"e\",8287,10095],\"id\":[8192,1],\"n_rows\":1,\"row\":[8192,1],\"source\":\"e.{e}\"}]");
  free(text);
}

static void irregular_shards_are_listed(void **state) {
  (void)state;
  static const struct {
    const char *before, *after;
  } no_component[] = {{"e", ".w"}, {"e.x", ".w"}, {"e.", "x.w"}, {"e.0", ".w"}, {"e.{", "}.w"}, {"{i}.", ".w"}};
  for (size_t i = 0; i < sizeof no_component / sizeof no_component[0]; i++) {
    fill_run(0, 1, 9, no_component[i].before, no_component[i].after, 1, 4);
    char *text = shards_text(many, 9);
    assert_null(strstr(text, "each"));
    free(text);
  }
  fill_run(0, 1, 16, "e.", ".w", 0, 4);
  for (size_t i = 0; i < 16; i++)
    many[i].file = 1;  // of the target: the file must be said
  char *text = shards_text(many, 16);
  assert_null(strstr(text, "each"));
  free(text);
  fill_run(0, 1, 16, "e.", ".w", 0, 4);
  many[8].n_rows = 3;
  text = shards_text(many, 16);  // 8, 1 and 7 of a kind
  assert_non_null(strstr(text, "[\"e\",0,8]"));
  assert_non_null(strstr(text, "\"source\":\"e.8.w\""));
  assert_non_null(strstr(text, "\"source\":\"e.15.w\""));
  free(text);
  fill_run(0, 1, 16, "e.", ".w", 0, 4);
  many[5].id = 99;
  text = shards_text(many, 16);
  assert_non_null(strstr(text, "[\"e\",6,16]"));
  assert_non_null(strstr(text, "\"id\":99"));
  free(text);
  fill_run(0, 1, 16, "e.", ".w", 0, 4);
  for (size_t i = 9; i < 16; i++)
    many[i].row += 2;  // a gap
  text = shards_text(many, 16);
  assert_non_null(strstr(text, "[\"e\",0,9]"));
  assert_null(strstr(text, "[\"e\",9,"));
  free(text);
}

// 92 layers of 896 experts, two parameters each: 494,592 shards, and 247,296 quantised modules beside them, take less than 1 MB of manifest.
static void half_a_million_shards_take_less_than_a_megabyte(void **state) {
  (void)state;
  enum { LAYERS = 92, EXPERTS = 896 };
  static const char *const params[] = {"weight_packed", "weight_scale"}, *const parts[] = {"w1", "w3", "w2"};
  struct k3_arena arena = {0};
  struct k3_manifest m = everything();
  m.tensors = k3_arena_alloc(&arena, sizeof *m.tensors * LAYERS * 4, NULL);
  m.n_tensors = 0;
  m.linears = k3_arena_alloc(&arena, sizeof *m.linears * LAYERS * EXPERTS * 3, NULL);
  m.n_linears = 0;
  char name[128];
  for (int layer = 0; layer < LAYERS; layer++) {
    for (int e = 0; e < EXPERTS * 3; e++) {
      int n = snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.%s", layer, e / 3, parts[e % 3]);
      m.linears[m.n_linears++] = (struct k3_manifest_linear){k3_arena_strndup(&arena, name, (size_t)n, NULL), "mxfp4", 1, 32, false, NULL};
    }
    for (int t = 0; t < 4; t++) {
      size_t n_parts = t < 2 ? 2 : 1;
      int n = snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%s.%s", layer, t < 2 ? "w13" : "w2", params[t % 2]);
      struct k3_manifest_tensor *tensor = &m.tensors[m.n_tensors++];
      *tensor = (struct k3_manifest_tensor){k3_arena_strndup(&arena, name, (size_t)n, NULL), K3_ROLE_CORE, K3_TP_COLUMN, NULL, EXPERTS * n_parts, 0};
      tensor->shards = k3_arena_alloc(&arena, tensor->n_shards * sizeof *tensor->shards, NULL);
      for (size_t s = 0; s < tensor->n_shards; s++) {
        n = snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%zu.%s.%s", layer, s / n_parts, t < 2 ? parts[s % 2] : "w2",
                     params[t % 2]);
        tensor->shards[s] = (struct k3_manifest_shard){s, k3_arena_strndup(&arena, name, (size_t)n, NULL), (int64_t)0, s * 1536, 1536};
      }
    }
  }
  char *text = k3_manifest_to_json(&m, NULL), *again;
  assert_true(strlen(text) < 1000000);
  struct k3_manifest back = must_parse(text);
  assert_int_equal(back.n_tensors, LAYERS * 4);
  assert_int_equal(back.n_linears, LAYERS * EXPERTS * 3);
  for (size_t i = 0; i < m.n_tensors; i++) {
    const struct k3_manifest_tensor *tensor = k3_manifest_tensor_of(&back, m.tensors[i].name);
    assert_true(tensor && tensor->n_shards == m.tensors[i].n_shards && tensor->tp == K3_TP_COLUMN);
    for (size_t s = 0; s < tensor->n_shards; s++) {
      const struct k3_manifest_shard *a = &tensor->shards[s], *b = &m.tensors[i].shards[s];
      if (a->id != b->id || a->row != b->row || a->n_rows != b->n_rows || strcmp(a->source, b->source) != 0)
        fail_msg("%s: shard %zu is %s", tensor->name, s, a->source);
    }
  }
  for (size_t i = 0; i < m.n_linears; i++) {
    const struct k3_manifest_linear *linear = k3_manifest_linear_of(&back, m.linears[i].module);
    if (!linear || strcmp(linear->scheme, "mxfp4") != 0 || linear->block_cols != 32)
      fail_msg("%s is lost", m.linears[i].module);
  }
  again = k3_manifest_to_json(&back, NULL);
  assert_string_equal(text, again);
  k3_free(text);
  k3_free(again);
  k3_manifest_free(&back);
  k3_arena_free(&arena);
}

// ---- malformed ----

// The text of one_of_everything with the first `from` replaced by `to`.
static enum k3_status parse_changed(const char *from, const char *to, struct k3_manifest *m, struct k3_error *err) {
  char text[8192];
  const char *at = strstr(everything_text, from);
  if (!at)
    fail_msg("no %s in the text", from);
  int n = snprintf(text, sizeof text, "%.*s%s%s", (int)(at - everything_text), everything_text, to, at + strlen(from));
  return parse_n(text, (size_t)n, m, err);
}

static void everything_else_is_refused(void **state) {
  (void)state;
#define EACH(...) "\"shards\":[{\"each\":" __VA_ARGS__ "}],\"tp\":\"vocab\""
  static const char *const embed_shards =
      "\"shards\":[{\"file\":1,\"id\":0,\"n_rows\":16,\"row\":0,\"source\":\"language_model.embed.weight\"}],\"tp\":\"vocab\"";
  const char *changes[][3] = {
      {"\"image_version\":1", "\"image_version\":2", "version 2"},
      {"\"image_version\":1", "\"image_version\":0", "image_version is 0"},
      {"\"image_version\":1", "\"image_version\":\"1\"", "image_version is the text"},
      {"\"image_version\":1,", "", "image_version is nothing"},
      {"\"crc\":false,", "", "crc is nothing"},
      {"\"digests\":true", "\"digests\":1", "digests is 1"},
      {"\"tool\":\"k3pack 1.2.3\",", "", "tool is nothing"},
      {"\"recipe\":{", "\"recipe\":[],\"r\":{", "recipe is a list"},
      {"\"name\":\"k3-dspark\"", "\"name\":5", "name is 5"},
      {"\"model\":{\"family\":\"generic\"}", "\"model\":{}", "family is nothing"},
      {"\"model\":{\"family\":\"generic\"}", "\"model\":null", "model is null"},
      {"\"model\":{\"family\":\"generic\"}", "\"model\":{\"family\":\"k3-dspark\"}", "norm"},
      {"\"names\":{", "\"names\":[],\"n\":{", "names is a list"},
      {"\"aliases\":{", "\"aliases\":[],\"n\":{", "aliases is a list"},
      {"\"fc\":\"context_proj\"", "\"fc\":\"\"", "fc is the text"},
      {"\"root\":\"\"", "\"root\":1", "root is 1"},
      {"\"file\":\"config.json\"", "\"file\":\"../config.json\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"/etc/passwd\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"..\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"a\\\\b\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"a\\nb\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"\"", "file is the text"},
      {"\"file\":\"config.json\"", "\"file\":\"model-00001-of-00002.safetensors\"", "twice"},
      {"\"tensor\":\"__source__.2\"", "\"tensor\":\"__source__.0\"", "twice"},
      {"\"tensor\":\"__source__.2\"", "\"tensor\":\"__source__.\"", "tensor is"},
      {"\"tensor\":\"__source__.2\"", "\"tensor\":\"__source__.2x\"", "tensor is"},
      {"\"tensor\":\"__source__.2\"", "\"tensor\":\"weight\"", "tensor is"},
      {"\"tensor\":\"__source__.2\"", "\"tensor\":\"__source__.1234567890\"", "tensor is"},
      {"\"size\":4096", "\"size\":-1", "size is -1"},
      {"\"size\":4096", "\"size\":7", "size is 7"},
      {"\"size\":4096", "\"size\":4096.0", "size is 4096.0"},
      {"\"of\":\"source\"", "\"of\":\"draft\"", "of is"},
      {"\"of\":\"source\",", "", "of is nothing"},
      {"\"sha256\":\"" SHA "\",\"size\":100", "\"sha256\":\"00\",\"size\":100", "sha256"},
      {"\"sources\":[", "\"sources\":{\"a\":", ""},
      {"\"documents\":[{", "\"documents\":[5,{", "documents is 5"},
      {"\"name\":\"model.confidence.*\"", "\"name\":\"model.embed_tokens.weight\"", "twice"},
      {"\"name\":\"model.confidence.*\"", "\"name\":\"\"", "name is"},
      {"\"role\":\"optional\"", "\"role\":\"extra\"", "role is"},
      {"\"tp\":\"column\"", "\"tp\":\"diagonal\"", "tp is"},
      {"\"tp\":\"column\"", "\"tp\":null", "tp is null"},
      {"\"shards\":[{\"file\":1", "\"shards\":[7,{\"file\":1", "shards is 7"},
      {"\"file\":1", "\"file\":2", "2 sources"},
      {"\"file\":1", "\"file\":-1", "file is -1"},
      {"\"n_rows\":16", "\"n_rows\":9007199254740993", "n_rows is"},
      {"\"n_rows\":16,", "", "n_rows is nothing"},
      {"\"n_rows\":4", "\"n_rows\":5", "row 4 is in two shards"},
      {"\"source\":\"layers.0.q_a.weight\"", "\"source\":\"\"", "source is"},
      {"\"block\":[128,128]", "\"block\":[128]", "block is a list"},
      {"\"block\":[128,128]", "\"block\":[0,128]", "block is 0"},
      {"\"block\":[128,128]", "\"block\":[128,128],\"group\":1", "a group and a block"},
      {"\"group\":16", "\"group\":0", "group is 0"},
      {"\"scheme\":\"fp8-block\"", "\"scheme\":3", "scheme is 3"},
      {"\"second_scale\":\"divide\"", "\"second_scale\":\"both\"", "second_scale is"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":[\"\"]", "a module is"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":{}", "modules is an object"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":[[]]", "a module is a list"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":[\"model.layers.0.o\"]", "twice"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":[{\"each\":[\"e\",0,9],\"module\":\"x\"}]", "module is the text"},
      {"\"modules\":[\"model.layers.0.down\"]", "\"modules\":[{\"module\":\"x\"}]", "each is nothing"},
      {"\"views\":{", "\"views\":[],\"v\":{", "views is a list"},
      {"\"model.context_kv_proj.weight\":[", "\"v\":[],\"model.context_kv_proj.weight\":[", "no shards"},
      {"\"model.context_kv_proj.weight\":[", "\"v\":7,\"model.context_kv_proj.weight\":[", "v is 7"},
      {"\"model.context_kv_proj.weight\":[", "\"\":[{}],\"model.context_kv_proj.weight\":[", "empty"},
      {"{\"id\":1,\"n_rows\":3", "{\"id\":0,\"n_rows\":3", "after shard 0"},
      {"{\"id\":1,\"n_rows\":3", "{\"id\":1,\"n_rows\":0", "n_rows is 0"},
      {"{\"id\":1,\"n_rows\":3", "{\"id\":\"1\",\"n_rows\":3", "id is the text"},
      {"\"producer\":\"model.layers.{i}.o_proj\"", "\"producer\":\"\"", "producer is"},
      {"\"why\":\"recomputed\"", "\"why\":[]", "why is a list"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"x\""), "source is"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}{e}\""), "source is"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{f}.{e}\""), "source is"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":7"), "source is 7"},
      {embed_shards, EACH("[\"e\",9,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "each is 9"},
      {embed_shards, EACH("[\"e\",0,4097],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "each is 4097"},
      {embed_shards, EACH("[\"e\",0],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "each is a list"},
      {embed_shards, EACH("[\"ee\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{ee}\""), "each is the text"},
      {embed_shards, EACH("[7,0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "each is 7"},
      {embed_shards, EACH("{},\"id\":[0,1],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "each is an object"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[9007199254740992,1],\"n_rows\":1,\"source\":\"{e}\""), "range of row"},
      {embed_shards, EACH("[\"e\",0,4096],\"id\":[0,9007199254740992],\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "range of id"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":0,\"row\":[0,1],\"n_rows\":1,\"source\":\"{e}\""), "id is 0"},
      {embed_shards, EACH("[\"e\",0,9],\"id\":[0,1],\"row\":[0,1],\"n_rows\":2,\"source\":\"{e}\""), "two shards"},
      {"{\"crc\"", "{\"crc\":false,\"crc\"", "second time"},
      {"{\"crc\"", "\xEF\xBB\xBF{\"crc\"", "byte-order mark"},
      {"{\"crc\":false", "{\"crc\":NaN", "found 'N'"},
  };
  struct k3_manifest m;
  struct k3_error err;
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    if (parse_changed(changes[i][0], changes[i][1], &m, &err) != K3_BAD_INPUT ||
        !(strstr(err.found, changes[i][2]) || strstr(err.tensor, changes[i][2])))
      fail_msg("%s: \"%s\" at \"%s\" instead of \"%s\"", changes[i][1], err.found, err.tensor, changes[i][2]);
    assert_string_equal(k3_rule_info(err.rule)->id, "IMG01");
    assert_string_equal(err.file, "image");
    assert_true(m.n_tensors == 0 && !m.arena.blocks);
  }
  // And what is fine.
  assert_int_equal(parse_changed("{\"crc\"", "{\"a key of later days\":[1],\"crc\"", &m, &err), K3_OK);
  k3_manifest_free(&m);
  assert_int_equal(parse_changed(embed_shards, EACH("[\"z\",5,4101],\"id\":[3,0],\"row\":[7,2],\"n_rows\":2,\"source\":\"a{z}b\""), &m, &err), K3_OK);
  const struct k3_manifest_tensor *tensor = k3_manifest_tensor_of(&m, "model.embed_tokens.weight");
  assert_int_equal(tensor->n_shards, 4096);
  assert_string_equal(tensor->shards[4095].source, "a4100b");
  assert_true(tensor->shards[4095].id == 3 && tensor->shards[4095].row == 7 + 2 * 4095 && tensor->shards[4095].file == -1);
  k3_manifest_free(&m);
  assert_int_equal(parse_n("", 0, &m, &err), K3_BAD_INPUT);
  for (size_t n = 1; n < sizeof everything_text - 1; n++) {
    assert_int_equal(parse_n(everything_text, n, &m, &err), K3_BAD_INPUT);
    assert_string_equal(k3_rule_info(err.rule)->id, "IMG01");
  }
}

// A text of a few hundred kilobytes that asks for more than 4,000,000 shards, or for names of gigabytes, is refused before it gets them.
static void small_texts_ask_for_little_memory(void **state) {
  (void)state;
  enum { RUNS = 1000 };
  for (int wide = 0; wide < 2; wide++) {
    char *filler = calloc(1, 4001), *text = malloc(RUNS * 4300);
    memset(filler, 'a', wide ? 3900 : 1);
    size_t n = (size_t)sprintf(text,
                               "{\"image_version\":1,\"tool\":\"\",\"digests\":true,\"crc\":false,\"recipe\":{\"name\":\"x\"},"
                               "\"model\":{\"family\":\"generic\"},\"tensors\":[");
    for (int i = 0; i < RUNS; i++)
      n += (size_t)sprintf(text + n,
                           "%s{\"name\":\"t%d\",\"shards\":[{\"each\":[\"e\",0,4096],\"id\":[0,1],\"n_rows\":1,\"row\":[0,1],\"source\":\"%s{e}\"}]}",
                           i ? "," : "", i, filler);
    n += (size_t)sprintf(text + n, "]}");
    struct k3_manifest m;
    struct k3_error err;
    assert_int_equal(parse_n(text, n, &m, &err), K3_BAD_INPUT);
    assert_non_null(strstr(err.found, "too many"));
    free(filler);
    free(text);
  }
  struct k3_manifest m;
  struct k3_error err = {0};
  static const char huge[1] = {'{'};
  assert_int_equal(k3_manifest_parse(huge, K3_MANIFEST_MAX_NBYTES + 1, "image", &m, &err), K3_BAD_INPUT);
  assert_non_null(strstr(err.found, "16777217"));
}

// ---- against the header ----

static void checkable(struct build *b) {
  *b = (struct build){0};
  build_add(b, "model.embed_tokens.weight", K3_DTYPE_BF16, 2, 16, 8, 0);
  build_add(b, "model.layers.0.qkv.weight", K3_DTYPE_BF16, 2, 7, 8, 0);
  build_add(b, "model.layers.1.qkv.weight", K3_DTYPE_BF16, 2, 7, 8, 0);
  build_add(b, "model.layers.0.up.weight_packed", K3_DTYPE_U8, 2, 4, 16, 0);
  build_add(b, "model.layers.0.up.weight_scale", K3_DTYPE_F8_E4M3, 2, 4, 2, 0);
  build_add(b, "model.layers.0.down.weight", K3_DTYPE_F8_E4M3, 2, 256, 130, 0);
  build_add(b, "model.layers.0.down.weight_scale", K3_DTYPE_F32, 2, 3, 2, 0);
  build_add(b, "model.layers.0.o.weight", K3_DTYPE_F8_E4M3, 2, 4, 4, 0);
  build_add(b, "model.layers.2.up.weight", K3_DTYPE_U8, 2, 4, 16, 0);
  build_add(b, "model.layers.2.up.weight_scale", K3_DTYPE_F8_E4M3, 2, 4, 2, 0);
  build_add(b, "model.layers.9.up.weight_packed", K3_DTYPE_U8, 2, 4, 16, 0);
  build_add(b, "model.layers.10.up.weight_packed", K3_DTYPE_U8, 2, 4, 16, 0);
  build_add(b, "__source__.0", K3_DTYPE_U8, 1, 4096, 0, 0);
  build_add(b, "__source__.1", K3_DTYPE_U8, 1, 10, 0, 0);
  build_add(b, "__source__.2", K3_DTYPE_U8, 1, 0, 0, 0);
}

static enum k3_status check_built(const struct build *b, const struct k3_manifest *m, struct k3_error *err) {
  struct k3_st_header header;
  *err = (struct k3_error){0};
  build_header(b, &header);
  enum k3_status status = k3_manifest_check(m, &header, "image", err);
  k3_st_header_free(&header);
  return status;
}

static void refuse_built(const struct build *b, const struct k3_manifest *m, const char *rule, const char *where, const char *said) {
  struct k3_error err;
  assert_int_equal(check_built(b, m, &err), K3_BAD_INPUT);
  if (strcmp(k3_rule_info(err.rule)->id, rule) != 0 || strcmp(err.tensor, where) != 0 || !strstr(err.found, said))
    fail_msg("%s %s \"%s\" instead of %s %s \"%s\"", k3_rule_info(err.rule)->id, err.tensor, err.found, rule, where, said);
  assert_string_equal(err.file, "image");
}

static void the_header_must_agree(void **state) {
  (void)state;
  struct k3_manifest m = must_parse(everything_text);
  struct build b;
  struct k3_error err;
  checkable(&b);
  assert_int_equal(check_built(&b, &m, &err), K3_OK);
  static const struct {
    const char *tensor;  // changed to
    struct build_tensor to;
    const char *rule, *where, *said;
  } cases[] = {
      {"__source__.0", {"x", K3_DTYPE_U8, 1, {4096}}, "IMG01", "__source__.0", "no such tensor"},
      {"__source__.0", {"__source__.0", K3_DTYPE_U8, 1, {4097}}, "IMG01", "__source__.0", "not a list of bytes"},
      {"__source__.0", {"__source__.0", K3_DTYPE_U8, 1, {9}}, "IMG01", "__source__.0", "not a list of bytes"},
      {"__source__.0", {"__source__.0", K3_DTYPE_I8, 1, {4096}}, "IMG01", "__source__.0", "not a list of bytes"},
      {"__source__.2", {"__source__.2", K3_DTYPE_U8, 2, {2, 2}}, "IMG01", "__source__.2", "not a list of bytes"},
      {"model.embed_tokens.weight", {"x", K3_DTYPE_BF16, 2, {16, 8}}, "IMG01", "model.embed_tokens.weight", "not stored"},
      {"model.embed_tokens.weight", {"model.embed_tokens.weight", K3_DTYPE_BF16, 2, {15, 8}}, "IMG01", "model.embed_tokens.weight", "has 15 rows"},
      {"model.embed_tokens.weight", {"model.embed_tokens.weight", K3_DTYPE_BF16, 0, {0}}, "IMG01", "model.embed_tokens.weight", "has 1 rows"},
      {"model.layers.1.qkv.weight", {"x", K3_DTYPE_BF16, 2, {7, 8}}, "IMG03", "model.context_kv_proj.weight", "no weight of this image"},
      {"model.layers.1.qkv.weight", {"model.layers.1.qkv.weight", K3_DTYPE_BF16, 2, {6, 8}}, "IMG03", "model.context_kv_proj.weight", "which has 6"},
      {"model.layers.1.qkv.weight", {"model.layers.1.qkv.weight", K3_DTYPE_F16, 2, {7, 8}}, "IMG03", "model.context_kv_proj.weight", "is F16"},
      {"model.layers.1.qkv.weight",
       {"model.layers.1.qkv.weight", K3_DTYPE_BF16, 2, {7, 9}},
       "IMG03",
       "model.context_kv_proj.weight",
       "another shape"},
      {"model.layers.1.qkv.weight", {"model.layers.1.qkv.weight", K3_DTYPE_BF16, 1, {7}}, "IMG03", "model.context_kv_proj.weight", "another shape"},
      {"model.layers.1.qkv.weight", {"model.layers.1.qkv.weight", K3_DTYPE_BF16, 0, {0}}, "IMG03", "model.context_kv_proj.weight", "which has 1"},
      {"__source__.2", {"model.context_kv_proj.weight", K3_DTYPE_U8, 1, {0}}, "IMG01", "__source__.2", "no such tensor"},
      {"model.layers.0.o.weight", {"model.layers.0.o.bias", K3_DTYPE_BF16, 1, {4}}, "IMG01", "model.layers.0.o", "without a weight"},
      {"model.layers.0.up.weight_packed", {"model.layers.0.up.x", K3_DTYPE_U8, 2, {4, 16}}, "IMG01", "model.layers.0.up", "without a weight"},
      {"model.layers.0.up.weight_scale", {"model.layers.0.up.weight_scale", K3_DTYPE_F8_E4M3, 2, {4, 1}}, "IMG01", "model.layers.0.up", "shape"},
      {"model.layers.0.up.weight_scale", {"model.layers.0.up.weight_scale", K3_DTYPE_F8_E4M3, 2, {3, 2}}, "IMG01", "model.layers.0.up", "shape"},
      {"model.layers.2.up.weight_scale", {"model.layers.2.up.weight_scale", K3_DTYPE_F8_E4M3, 2, {4, 1}}, "IMG01", "model.layers.2.up", "shape"},
      {"model.layers.0.down.weight_scale", {"model.layers.0.down.weight_scale", K3_DTYPE_F32, 2, {2, 1}}, "IMG01", "model.layers.0.down", "shape"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    checkable(&b);
    *build_find(&b, cases[i].tensor) = cases[i].to;
    refuse_built(&b, &m, cases[i].rule, cases[i].where, cases[i].said);
  }
  checkable(&b);
  build_add(&b, "model.context_kv_proj.weight", K3_DTYPE_BF16, 2, 6, 8, 0);
  refuse_built(&b, &m, "IMG03", "model.context_kv_proj.weight", "a view and a stored tensor");
  k3_manifest_free(&m);
}

// A view that points at itself, at another view, or at a tensor of the container.
static void views_of_views(void **state) {
  (void)state;
  static const char *const targets[][2] = {
      {"model.context_kv_proj.weight", "the view itself"}, {"model.other.weight", "another view"}, {"__source__.0", "no weight of this image"}};
  for (int i = 0; i < 3; i++) {
    char to[512];
    struct k3_manifest m;
    struct k3_error err;
    snprintf(to, sizeof to,
             "\"views\":{\"model.other.weight\":[{\"id\":0,\"n_rows\":1,\"row\":0,\"tensor\":\"model.layers.0.qkv.weight\"}],"
             "\"model.context_kv_proj.weight\":[{\"id\":7,\"n_rows\":1,\"row\":0,\"tensor\":\"%s\"}],\"x\":[",
             targets[i][0]);
    // The old shards now belong to a view called x.
    assert_int_equal(parse_changed("\"views\":{\"model.context_kv_proj.weight\":[", to, &m, &err), K3_OK);
    struct build b;
    checkable(&b);
    refuse_built(&b, &m, "IMG03", "model.context_kv_proj.weight", targets[i][1]);
    k3_manifest_free(&m);
  }
}

// Rows of 4-bit elements that do not begin at a byte have no address.
static void rows_of_half_bytes(void **state) {
  (void)state;
  struct k3_manifest m = must_parse(everything_text);
  struct build b;
  checkable(&b);
  for (int i = 0; i < 2; i++)
    *build_find(&b, i ? "model.layers.1.qkv.weight" : "model.layers.0.qkv.weight") =
        (struct build_tensor){i ? "model.layers.1.qkv.weight" : "model.layers.0.qkv.weight", K3_DTYPE_F4, 2, {8, 3}};
  refuse_built(&b, &m, "IMG03", "model.context_kv_proj.weight", "do not begin at bytes");
  k3_manifest_free(&m);
}

// ---- memory ----

static void *counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

static void memory_may_fail_anywhere(void **state) {
  (void)state;
  json_set_alloc_funcs(counted_malloc, k3_free);
  bool done = false;
  struct k3_manifest m;
  struct k3_error err;
  for (uint64_t n = 1; !done; n++) {
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    enum k3_status status = parse_n(everything_text, sizeof everything_text - 1, &m, &err);
    done = k3_alloc_count() - before < n;
    k3_alloc_fail_at(0);
    assert_int_equal(status, done ? K3_OK : K3_NO_MEMORY);
    if (!done)
      assert_true(err.status == K3_NO_MEMORY && !m.arena.blocks);
  }
  done = false;
  for (uint64_t n = 1; !done; n++) {
    err = (struct k3_error){0};
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    char *text = k3_manifest_to_json(&m, &err);
    done = k3_alloc_count() - before < n;
    k3_alloc_fail_at(0);
    assert_true(done == (text != NULL));
    assert_int_equal(err.status, done ? K3_OK : K3_NO_MEMORY);
    k3_free(text);
  }
  k3_manifest_free(&m);
  json_set_alloc_funcs(malloc, free);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(one_of_everything),
      cmocka_unit_test(lookups),
      cmocka_unit_test(patterns_of_different_length),
      cmocka_unit_test(the_model_object),
      cmocka_unit_test(a_run_is_one_entry),
      cmocka_unit_test(runs_that_take_turns),
      cmocka_unit_test(long_runs_are_cut),
      cmocka_unit_test(irregular_shards_are_listed),
      cmocka_unit_test(half_a_million_shards_take_less_than_a_megabyte),
      cmocka_unit_test(everything_else_is_refused),
      cmocka_unit_test(small_texts_ask_for_little_memory),
      cmocka_unit_test(the_header_must_agree),
      cmocka_unit_test(views_of_views),
      cmocka_unit_test(rows_of_half_bytes),
      cmocka_unit_test(memory_may_fail_anywhere),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
