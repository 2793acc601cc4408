/* Loads the libraries with dlopen, uses them, and unloads them, several times. This program is not
 * linked with them. */
#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#include "check.h"

static int count_entries(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;

	NEED(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

#define FIND(name) \
	__typeof__(ibv_##name) *name = (__typeof__(ibv_##name) *)dlsym(library, "ibv_" #name)

static void use_library(void *library)
{
	FIND(get_device_list);
	FIND(free_device_list);
	FIND(open_device);
	FIND(close_device);
	FIND(alloc_pd);
	FIND(dealloc_pd);
	struct ibv_device **list;
	struct ibv_context *context;
	struct ibv_pd *pd;

	NEED(get_device_list && free_device_list && open_device && close_device && alloc_pd && dealloc_pd);
	list = get_device_list(NULL);
	NEED(list && list[0]);
	context = open_device(list[0]);
	NEED(context);
	free_device_list(list);
	pd = alloc_pd(context);
	NEED(pd);
	CODE(0, dealloc_pd(pd));
	CODE(0, close_device(context));
}

int main(void)
{
	int descriptors = 0, threads = 0;

	for (int round = 0; round < 50; round++) {
		void *verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
		void *manager = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);

		NEED(verbs && manager);
		use_library(verbs);
		CODE(0, dlclose(manager));
		CODE(0, dlclose(verbs));
		if (round == 1) {
			descriptors = count_entries("/proc/self/fd");
			threads = count_entries("/proc/self/task");
		}
	}
	CHECK(count_entries("/proc/self/fd") <= descriptors);
	CHECK(count_entries("/proc/self/task") <= threads);
	return result();
}
