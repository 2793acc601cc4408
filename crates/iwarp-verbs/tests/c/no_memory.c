/* Each allocation that the creation of an object makes fails once, by itself and together with all later ones. The creation then returns
 * NULL with ENOMEM, or an object that is whole; the process goes on, and nothing is left behind. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "check.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SWEEPS = 5 };

/* Allocations of this thread until one fails; -1: none does. */
static __thread long until = -1;
static __thread int all_later, denied_some;
static atomic_long living;

static int denied(void)
{
	if (until < 0)
		return 0;
	if (until > 0) {
		until--;
		return 0;
	}
	if (!all_later)
		until = -1;
	denied_some = 1;
	errno = ENOMEM;
	return 1;
}

static void *counted(void *p)
{
	if (p)
		living++;
	return p;
}

void *malloc(size_t size)
{
	return denied() ? NULL : counted(__libc_malloc(size));
}

void *calloc(size_t n, size_t size)
{
	return denied() ? NULL : counted(__libc_calloc(n, size));
}

void *realloc(void *p, size_t size)
{
	if (denied())
		return NULL;
	return p ? __libc_realloc(p, size) : counted(__libc_realloc(p, size));
}

void *memalign(size_t align, size_t size)
{
	return denied() ? NULL : counted(__libc_memalign(align, size));
}

void *aligned_alloc(size_t align, size_t size)
{
	return memalign(align, size);
}

int posix_memalign(void **to, size_t align, size_t size)
{
	*to = memalign(align, size);
	return *to ? 0 : ENOMEM;
}

void free(void *p)
{
	if (p)
		living--;
	__libc_free(p);
}

static struct ibv_device **devices;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct rdma_event_channel *events;
static char memory[8192];

static void *make_context(void) { return ibv_open_device(devices[0]); }
static int drop_context(void *p) { return ibv_close_device(p); }
static void *make_pd(void) { return ibv_alloc_pd(context); }
static int drop_pd(void *p) { return ibv_dealloc_pd(p); }
static void *make_channel(void) { return ibv_create_comp_channel(context); }
static int drop_channel(void *p) { return ibv_destroy_comp_channel(p); }
static void *make_cq(void) { return ibv_create_cq(context, 10000, NULL, NULL, 0); }
static int drop_cq(void *p) { return ibv_destroy_cq(p); }
static void *make_mr(void) { return ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE); }
static int drop_mr(void *p) { return ibv_dereg_mr(p); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }
static int drop_mw(void *p) { return ibv_dealloc_mw(p); }

static void *make_srq(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 4000, .max_sge = 4 } };

	return ibv_create_srq(pd, &attr);
}

static int drop_srq(void *p) { return ibv_destroy_srq(p); }

static void *make_qp(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1000, 1000, 4, 4, 64 } };

	return ibv_create_qp(pd, &attr);
}

static int drop_qp(void *p) { return ibv_destroy_qp(p); }
static void *make_events(void) { return rdma_create_event_channel(); }

static int drop_events(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static void *make_id(void)
{
	struct rdma_cm_id *id;

	return rdma_create_id(events, &id, NULL, RDMA_PS_TCP) ? NULL : id;
}

static int drop_id(void *p) { return rdma_destroy_id(p); }
static void *make_list(void) { return ibv_get_device_list(NULL); }

static int drop_list(void *p)
{
	ibv_free_device_list(p);
	return 0;
}

static const struct {
	const char *name;
	void *(*make)(void);
	int (*drop)(void *);
} kinds[] = {
	{ "pd", make_pd, drop_pd },		 { "completion channel", make_channel, drop_channel },
	{ "completion queue", make_cq, drop_cq }, { "memory region", make_mr, drop_mr },
	{ "memory window", make_mw, drop_mw },	 { "shared receive queue", make_srq, drop_srq },
	{ "queue pair", make_qp, drop_qp },	 { "event channel", make_events, drop_events },
	{ "identifier", make_id, drop_id },	 { "context", make_context, drop_context },
	{ "device list", make_list, drop_list },
};

/* Lets each allocation of one kind fail. Returns how many creations failed. */
static int sweep(size_t kind)
{
	int failed = 0;

	for (all_later = 0; all_later < 2; all_later++) {
		for (long n = 0;; n++) {
			void *made;
			int code, was_denied;

			denied_some = 0;
			until = n;
			errno = 0;
			made = kinds[kind].make();
			code = errno;
			until = -1;
			was_denied = denied_some;
			if (made) {
				CODE(0, kinds[kind].drop(made));
			} else {
				if (code != ENOMEM)
					fprintf(stderr, "%s, allocation %ld: %s\n", kinds[kind].name, n, strerror(code));
				CODE(ENOMEM, code);
				failed++;
			}
			if (!was_denied)
				break;
			NEED(n < 10000);
		}
	}
	return failed;
}

int main(void)
{
	devices = ibv_get_device_list(NULL);
	NEED(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	NEED(context);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	events = rdma_create_event_channel();
	NEED(pd && cq && events);
	for (size_t kind = 0; kind < sizeof(kinds) / sizeof(*kinds); kind++) {
		long before;
		int failed = 0;

		/* The first sweep also makes what stays for the next object. */
		sweep(kind);
		sweep(kind);
		before = living;
		for (int i = 0; i < SWEEPS; i++)
			failed += sweep(kind);
		/* A leak is there after each sweep. A table of the library that happens to be enlarged is not. */
		if (living - before >= SWEEPS)
			fprintf(stderr, "%s: %ld allocations are left\n", kinds[kind].name, living - before);
		CHECK(living - before < SWEEPS);
		printf("%s: %d times no memory\n", kinds[kind].name, failed);
	}
	return result();
}
