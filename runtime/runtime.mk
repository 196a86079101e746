#help   install        program, library, headers and pkg-config file below DESTDIR and PREFIX (default /usr/local)
# The shared library holds the runtime and what it needs, and exports the names of runtime/exports.txt alone.
SO_VERSION := $(shell sed -n 's/.*K3_VERSION "\(.*\)"/\1/p' base/version.h)
SO_NAME    := libk3pack.so.$(firstword $(subst ., ,$(SO_VERSION)))
SO_DIRS    := base formats quant runtime runtime/cpu
SO_OBJ     := $(foreach d,$(SO_DIRS),$(patsubst %.c,$(B)/%.o,$(wildcard $(d)/*.c)))
PUBLIC_HEADERS := base/api.h base/dtype.h base/error.h base/progress.h base/rules.h base/rules_table.h base/status.h runtime/comm.h runtime/runtime.h
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib

all: $(B)/libk3pack.so

$(B)/libk3pack.map: runtime/exports.txt
	@mkdir -p $(@D)
	@{ echo '{ global:'; sed 's/$$/;/' runtime/exports.txt; echo 'local: *; };'; } > $@

$(B)/libk3pack.so: $(SO_OBJ) $(B)/libk3pack.map
	$(CC) -shared $(LDFLAGS_ALL) -Wl,-soname,$(SO_NAME) -Wl,--version-script=$(B)/libk3pack.map -o $@ $(SO_OBJ) $(LIBS)

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(PREFIX)/include/k3pack/base $(DESTDIR)$(PREFIX)/include/k3pack/runtime
	install -m 755 $(B)/k3pack $(DESTDIR)$(PREFIX)/bin/k3pack
	install -m 644 $(B)/libk3pack.a $(DESTDIR)$(LIBDIR)/libk3pack.a
	install -m 755 $(B)/libk3pack.so $(DESTDIR)$(LIBDIR)/libk3pack.so.$(SO_VERSION)
	ln -sf libk3pack.so.$(SO_VERSION) $(DESTDIR)$(LIBDIR)/$(SO_NAME)
	ln -sf $(SO_NAME) $(DESTDIR)$(LIBDIR)/libk3pack.so
	for header in $(PUBLIC_HEADERS); do install -m 644 $$header $(DESTDIR)$(PREFIX)/include/k3pack/$$header; done
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(SO_VERSION)|' -e 's|@LIBS@|$(LIBS)|' runtime/k3pack.pc.in \
	  > $(DESTDIR)$(LIBDIR)/pkgconfig/k3pack.pc

.PHONY: install
