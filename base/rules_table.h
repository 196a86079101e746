// The table behind base/rules.h: X(id, severity for k3pack, cost, condition).
#ifndef K3_BASE_RULES_TABLE_H
#define K3_BASE_RULES_TABLE_H

#define K3_RULE_TABLE(X)                                                                                               \
  X(CNT01, K3_ERROR, K3_COST_HEADERS, "a Git LFS pointer lies where a file should be")                                 \
  X(CNT02, K3_ERROR, K3_COST_HEADERS, "the safetensors header is too short, too long or not one JSON object")          \
  X(CNT03, K3_ERROR, K3_COST_HEADERS, "the file is shorter than its header says")                                      \
  X(CNT04, K3_ERROR, K3_COST_HEADERS, "trailing bytes, a hole or an overlap between tensors")                          \
  X(CNT05, K3_ERROR, K3_COST_HEADERS, "a tensor's span does not equal its shape times its element size")               \
  X(CNT06, K3_ERROR, K3_COST_HEADERS, "unknown dtype, or a packed dtype without a rule for its order")                 \
  X(CNT07, K3_ERROR, K3_COST_HEADERS, "a key occurs twice in one header")                                              \
  X(CNT08, K3_WARNING, K3_COST_HEADERS, "__metadata__ is not an object of strings")                                    \
  X(CNT09, K3_WARNING, K3_COST_HEADERS, "files of an unfinished download lie beside the shards")                       \
  X(CNT10, K3_WARNING, K3_COST_VALUES, "a tensor, or the last MiB of a file, is all zero bytes")                       \
  X(CNT11, K3_INFO, K3_COST_HEADERS, "tensor data is not aligned to its element size")                                 \
  X(CNT12, K3_ERROR, K3_COST_HEADERS, "a tensor name is empty, reserved, too long or holds a control character")       \
  X(IDX01, K3_ERROR, K3_COST_HEADERS, "the index names a file that is not there")                                      \
  X(IDX02, K3_ERROR, K3_COST_HEADERS, "the index promises a tensor that its file does not hold")                       \
  X(IDX03, K3_ERROR, K3_COST_HEADERS, "a tensor lives in two of the files in use")                                     \
  X(IDX04, K3_WARNING, K3_COST_HEADERS, "a file in use holds a tensor that the index does not list")                   \
  X(IDX05, K3_WARNING, K3_COST_HEADERS, "a safetensors file that the index never mentions is ignored")                 \
  X(IDX06, K3_ERROR, K3_COST_HEADERS, "it is open which files make up the checkpoint")                                 \
  X(IDX07, K3_WARNING, K3_COST_HEADERS, "metadata.total_size of the index is not the sum of the tensors' bytes")       \
  X(IDX08, K3_ERROR, K3_COST_HEADERS, "the numbering of the shards has a gap or disagrees")                            \
  X(IDX09, K3_ERROR, K3_COST_HEADERS, "a path of the index leaves the folder")                                         \
  X(IDX10, K3_ERROR, K3_COST_HEADERS, "the index is not well formed")                                                  \
  X(CFG01, K3_ERROR, K3_COST_HEADERS, "quantised tensors without any quantization config")                             \
  X(CFG02, K3_ERROR, K3_COST_HEADERS, "the config says quantised, the tensor is plain")                                \
  X(CFG03, K3_ERROR, K3_COST_HEADERS, "the config says not quantised, the tensor is")                                  \
  X(CFG04, K3_WARNING, K3_COST_HEADERS, "a quantization config, but every tensor is plain")                            \
  X(CFG05, K3_ERROR, K3_COST_HEADERS, "two quantization configs contradict each other")                                \
  X(CFG06, K3_WARNING, K3_COST_HEADERS, "a key of the other dialect's family in a quantization config")                \
  X(CFG07, K3_WARNING, K3_COST_HEADERS, "a pattern of the quantization config matches no module")                      \
  X(CFG08, K3_INFO, K3_COST_HEADERS, "a pattern depends on the layer index or the prefix")                          \
  X(CFG09, K3_INFO, K3_COST_HEADERS, "a glob would match other modules if read as substring or regex")              \
  X(CFG10, K3_ERROR, K3_COST_HEADERS, "a pattern is not a regular expression this matcher takes")                      \
  X(CFG11, K3_ERROR, K3_COST_HEADERS, "the arguments of a scheme contradict each other or its format name")            \
  X(CFG12, K3_WARNING, K3_COST_HEADERS, "two groups match one module equally well with different arguments")           \
  X(CFG13, K3_ERROR, K3_COST_HEADERS, "a mixed-precision map that does not fit the tensors")                           \
  X(CFG14, K3_ERROR, K3_COST_HEADERS, "sparsity, a rotation or AWQ scales that the output cannot express")             \
  X(CFG15, K3_WARNING, K3_COST_HEADERS, "a KV cache scheme without scales, or scales without a scheme")                \
  X(CFG16, K3_INFO, K3_COST_HEADERS, "ignore lists children where engines build one fused module")                  \
  X(CFG17, K3_INFO, K3_COST_HEADERS, "a drafter without a quantization statement of its own")                       \
  X(CFG18, K3_INFO, K3_COST_HEADERS, "a drafter in several mixed-precision groups")                                 \
  X(CFG19, K3_ERROR, K3_COST_HEADERS, "a JSON file of the folder is not parseable")                                    \
  X(CFG20, K3_ERROR, K3_COST_HEADERS, "a config field is missing, of the wrong type or contradictory")                 \
  X(CFG21, K3_ERROR, K3_COST_HEADERS, "recognised, but not supported here")                                            \
  X(TEN01, K3_ERROR, K3_COST_HEADERS, "a companion of a quantised weight is missing")                                  \
  X(TEN02, K3_ERROR, K3_COST_HEADERS, "a companion without its weight")                                                \
  X(TEN03, K3_ERROR, K3_COST_HEADERS, "one module stored in two formats at once")                                      \
  X(TEN04, K3_ERROR, K3_COST_HEADERS, "a dtype that the format does not allow")                                        \
  X(TEN05, K3_ERROR, K3_COST_HEADERS, "a scale tensor has the wrong number of columns")                                \
  X(TEN06, K3_ERROR, K3_COST_HEADERS, "a scale tensor has the wrong number of rows")                                   \
  X(TEN07, K3_ERROR, K3_COST_HEADERS, "a row is not a whole number of groups or bytes")                                \
  X(TEN08, K3_ERROR, K3_COST_SCALES, "weight_shape disagrees with the packed tensor or the config")                    \
  X(TEN09, K3_WARNING, K3_COST_HEADERS, "the bit width cannot be told from the shapes")                                \
  X(TEN10, K3_ERROR, K3_COST_SCALES, "weight_g_idx is out of range or uneven")                                         \
  X(TEN11, K3_ERROR, K3_COST_HEADERS, "a module's shape disagrees with the config")                                    \
  X(TEN12, K3_WARNING, K3_COST_HEADERS, "a scalar scale of unusual rank or precision")                                 \
  X(TEN13, K3_ERROR, K3_COST_HEADERS, "a block grid that leaves out the edge blocks")                                  \
  X(TEN14, K3_WARNING, K3_COST_HEADERS, "tie_word_embeddings and lm_head contradict each other")                       \
  X(TEN15, K3_ERROR, K3_COST_HEADERS, "a tensor is quantised that never may be")                                       \
  X(TEN16, K3_ERROR, K3_COST_HEADERS, "a tensor name that the model does not know")                                    \
  X(TEN17, K3_ERROR, K3_COST_SCALES, "zero points that are not zero in a symmetric scheme")                            \
  X(SCL01, K3_ERROR, K3_COST_SCALES, "a scale is NaN")                                                                 \
  X(SCL02, K3_ERROR, K3_COST_SCALES, "a scale is infinite")                                                            \
  X(SCL03, K3_ERROR, K3_COST_SCALES, "a global or input scale is zero")                                                \
  X(SCL04, K3_ERROR, K3_COST_SCALES, "a zero block scale over codes that are not zero")                                \
  X(SCL05, K3_ERROR, K3_COST_SCALES, "a negative scale in a floating format")                                          \
  X(SCL06, K3_INFO, K3_COST_SCALES, "negative scales in an integer format")                                            \
  X(SCL07, K3_ERROR, K3_COST_SCALES, "a scale that looks like a loader's placeholder")                                 \
  X(SCL08, K3_ERROR, K3_COST_SCALES, "a second scale that points the wrong way")                                       \
  X(SCL09, K3_WARNING, K3_COST_SCALES, "a second scale that is not tight")                                             \
  X(SCL10, K3_WARNING, K3_COST_SCALES, "subnormal block scales, which some kernels flush to zero")                     \
  X(SCL11, K3_WARNING, K3_COST_SCALES, "scales and the declared ue8m0 disagree")                                       \
  X(SCL12, K3_WARNING, K3_COST_SCALES, "an E8M0 scale outside the plausible window")                                   \
  X(SCL13, K3_WARNING, K3_COST_SCALES, "a scale equal to an epsilon: a dead region")                                   \
  X(SCL14, K3_WARNING, K3_COST_SCALES, "a scale far from its layer's median")                                          \
  X(SCL15, K3_ERROR, K3_COST_SCALES, "scales that look numerically converted")                                         \
  X(SCL16, K3_WARNING, K3_COST_SCALES, "KV cache scales that are not positive, or all exactly 1")                      \
  X(SCL17, K3_ERROR, K3_COST_SCALES, "input scales present for some experts only")                                     \
  X(SCL18, K3_WARNING, K3_COST_SCALES, "a 4/6-style file")                                                             \
  X(VAL01, K3_ERROR, K3_COST_VALUES, "NaN codes in FP8 weights")                                                       \
  X(VAL02, K3_ERROR, K3_COST_VALUES, "NaN or Inf in plain weights")                                                    \
  X(VAL03, K3_INFO, K3_COST_VALUES, "too many saturated codes")                                                        \
  X(VAL04, K3_INFO, K3_COST_VALUES, "NVFP4 blocks that never use the largest code")                                    \
  X(VAL05, K3_INFO, K3_COST_VALUES, "MXFP4 blocks that never use the large codes")                                     \
  X(VAL06, K3_INFO, K3_COST_VALUES, "a code histogram that looks like a stride or order error")                        \
  X(VAL07, K3_ERROR, K3_COST_BASELINE, "too far from the BF16 source")                                                 \
  X(VAL08, K3_INFO, K3_COST_VALUES, "zero blocks and dead rows")                                                       \
  X(VAL09, K3_WARNING, K3_COST_VALUES, "padding that is not zero")                                                     \
  X(VAL10, K3_WARNING, K3_COST_BASELINE, "bytes that requantisation would not give")                                   \
  X(FUS01, K3_ERROR, K3_COST_HEADERS, "members of a fused module use different schemes")                               \
  X(FUS02, K3_INFO, K3_COST_SCALES, "members of a fused module have different global scales")                          \
  X(FUS03, K3_INFO, K3_COST_SCALES, "members of a fused module have different input scales")                           \
  X(FUS04, K3_INFO, K3_COST_SCALES, "members of a fused module have different per-tensor FP8 scales")                  \
  X(FUS05, K3_INFO, K3_COST_HEADERS, "a member of a fused module ends inside a 128-row block")                         \
  X(FUS06, K3_INFO, K3_COST_SCALES, "the global scales of the cross-layer component are not one")                      \
  X(FUS07, K3_ERROR, K3_COST_HEADERS, "half of a pair is missing")                                                     \
  X(FUS08, K3_ERROR, K3_COST_HEADERS, "the row order of gate and up is not declared")                                  \
  X(FUS09, K3_INFO, K3_COST_SCALES, "a shared scale pushes blocks out of the dynamic range")                        \
  X(PCK01, K3_ERROR, K3_COST_HEADERS, "the target's alignment is violated")                                            \
  X(PCK02, K3_ERROR, K3_COST_SCALES, "a swizzled scale tensor of the wrong size or with odd padding")                  \
  X(PCK03, K3_ERROR, K3_COST_SCALES, "a scale layout that does not invert")                                            \
  X(PCK04, K3_ERROR, K3_COST_VALUES, "a weight layout that does not invert")                                           \
  X(PCK05, K3_ERROR, K3_COST_HEADERS, "a tensor-parallel split cuts a group, a block or a head")                       \
  X(PCK06, K3_ERROR, K3_COST_HEADERS, "a scheme that the target device cannot run natively")                           \
  X(PCK07, K3_WARNING, K3_COST_SCALES, "a global scale outside the safe exponent range of FP16 kernels")               \
  X(PCK08, K3_ERROR, K3_COST_VALUES, "a route that claims to be lossless is not")                                      \
  X(MAP01, K3_ERROR, K3_COST_HEADERS, "a source tensor that no module of the recipe claims")                           \
  X(MAP02, K3_ERROR, K3_COST_HEADERS, "a required tensor is absent")                                                   \
  X(MAP03, K3_ERROR, K3_COST_HEADERS, "two source tensors for one place")                                              \
  X(MAP04, K3_ERROR, K3_COST_HEADERS, "a shard id is missing, doubled or beyond the count")                            \
  X(MAP05, K3_ERROR, K3_COST_HEADERS, "a shape differs from what config and recipe give")                              \
  X(MAP06, K3_ERROR, K3_COST_HEADERS, "two roots are mixed in one checkpoint")                                         \
  X(MAP07, K3_ERROR, K3_COST_HEADERS, "a number in a name is not in its canonical spelling")                           \
  X(MAP08, K3_ERROR, K3_COST_HEADERS, "a dtype that the recipe does not allow here")                                   \
  X(MAP09, K3_ERROR, K3_COST_HEADERS, "an adapter, a pickle or another thing that is no model")                        \
  X(MAP10, K3_WARNING, K3_COST_VALUES, "the draft's own embedding or head differs from the target's")                  \
  X(OUT01, K3_ERROR, K3_COST_HEADERS, "the output exists and --force was not given")                                   \
  X(OUT02, K3_ERROR, K3_COST_HEADERS, "the output is, or contains, an input")                                          \
  X(OUT03, K3_ERROR, K3_COST_HEADERS, "not enough space for the output")                                               \
  X(RED01, K3_ERROR, K3_COST_HEADERS, "a partial sum reaches something else than the norm that completes it")          \
  X(RED02, K3_ERROR, K3_COST_HEADERS, "a sum is completed twice")                                                      \
  X(RED03, K3_ERROR, K3_COST_HEADERS, "a deferral where none is allowed")                                              \
  X(IMG01, K3_ERROR, K3_COST_HEADERS, "the image manifest is absent, of another version or contradicts the header")    \
  X(IMG02, K3_ERROR, K3_COST_VALUES, "a digest or the seal does not match")                                            \
  X(IMG03, K3_ERROR, K3_COST_HEADERS, "a view points outside its tensor or has another shape")                         \
  X(M3V07, K3_WARNING, K3_COST_HEADERS, "MiniMax-M3: a router tensor that is not F32, or a bias in another place")     \
  X(M3V11, K3_INFO, K3_COST_HEADERS, "MiniMax-M3: prediction modules are declared, but not in the files")              \
  X(M3V12, K3_WARNING, K3_COST_HEADERS, "MiniMax-M3: routing other than the released model's")                         \
  X(M3V14, K3_WARNING, K3_COST_HEADERS, "MiniMax-M3: a patch embedding that is not F32")                               \
  X(X08, K3_INFO, K3_COST_HEADERS, "prediction layers are declared, but not in the files")                             \
  X(K3V04, K3_WARNING, K3_COST_SCALES, "Kimi K3: the padding of A_log is not zero")                                    \
  X(K3V08, K3_WARNING, K3_COST_HEADERS, "Kimi K3: a router bias in another place")                                     \
  X(K3V12, K3_INFO, K3_COST_HEADERS, "Kimi K3: a tensor without its dimension of one")                                 \
  X(DSV08, K3_WARNING, K3_COST_VALUES, "DeepSeek-V3.2: a prediction layer whose embedding or head is no copy of the main one")\
  X(K3V14, K3_INFO, K3_COST_VALUES, "Kimi K3: embedding and head hold the same bytes")                                 \
  X(K3V15, K3_WARNING, K3_COST_HEADERS, "Kimi K3: a config field in the spelling of other models")                     \
  X(K3V18, K3_ERROR, K3_COST_HEADERS, "Kimi K3: not the number of tensors and bytes of the released model")

#endif
