/* Tests of functions, events and structure fields that only headers later than rdma-core 44
 * declare. This file declares them itself, under other names. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"

enum { IOVA = 1, ADDR = 2, FD = 4, FD_OFFSET = 8, DMAH = 16, BUF = 32 };

struct mr_attributes {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	void *buf;
};

struct ibv_mr *reg_mr_ex(struct ibv_pd *, struct mr_attributes *) __asm__("ibv_reg_mr_ex");
void *alloc_dmah(struct ibv_context *, void *) __asm__("ibv_alloc_dmah");
int dealloc_dmah(void *) __asm__("ibv_dealloc_dmah");
int dm_export(struct ibv_dm *) __asm__("ibv_dm_export_dmabuf_fd");
int port_speed(struct ibv_context *, uint32_t, uint64_t *) __asm__("ibv_query_port_speed");
void *alloc_buf(struct ibv_pd *, size_t, void **) __asm__("ibv_alloc_buf");
void free_buf(void *) __asm__("ibv_free_buf");
struct ibv_mr *reg_buf_mr(struct ibv_pd *, void *, void *, size_t, int) __asm__("ibv_reg_buf_mr");
int export_buf(void *) __asm__("ibv_export_buf_dmabuf_fd");
int resolve_addrinfo(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *)
	__asm__("rdma_resolve_addrinfo");
int query_addrinfo(struct rdma_cm_id *, struct rdma_addrinfo **) __asm__("rdma_query_addrinfo");
int write_cm_event(struct rdma_cm_id *, unsigned, int, uint64_t) __asm__("rdma_write_cm_event");

static struct ibv_context *ctx;
static struct ibv_pd *pd, *other_pd;

static void test_registration(void)
{
	static char memory[8192];
	struct mr_attributes a = { .length = sizeof(memory), .access = IBV_ACCESS_LOCAL_WRITE,
		.addr = memory };
	struct ibv_sge sge = { .length = sizeof(memory) };
	struct ibv_mr *mr;

	IS_NULL(EINVAL, reg_mr_ex(pd, NULL));
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	a.comp_mask = ADDR | FD;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	a.comp_mask = ADDR | FD_OFFSET;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	/* The kernel requires an offset and an address together with a descriptor. */
	a.comp_mask = FD | FD_OFFSET;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	a.comp_mask = FD | IOVA;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	a.comp_mask = FD | FD_OFFSET | IOVA;
	a.fd = -1;
	IS_NULL(EBADF, reg_mr_ex(pd, &a));
	a.comp_mask = ADDR | DMAH;
	IS_NULL(EOPNOTSUPP, reg_mr_ex(pd, &a));
	a.comp_mask = ADDR | 1 << 6;
	IS_NULL(EOPNOTSUPP, reg_mr_ex(pd, &a));
	a.comp_mask = ADDR;
	IS_NULL(EINVAL, reg_mr_ex(NULL, &a));

	NEED((mr = reg_mr_ex(pd, &a)));
	CHECK(mr->addr == memory && mr->length == sizeof(memory) && mr->pd == pd && mr->context == ctx);
	sge.lkey = mr->lkey;
	sge.addr = (uintptr_t)memory;
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
	CODE(0, ibv_dereg_mr(mr));

	a.comp_mask = ADDR | IOVA;
	a.iova = 0x10000;
	NEED((mr = reg_mr_ex(pd, &a)));
	sge.lkey = mr->lkey;
	CODE(EFAULT, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
	sge.addr = a.iova;
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
	CODE(0, ibv_dereg_mr(mr));
}

static void test_buffers(void)
{
	const size_t size = 10000;
	struct mr_attributes a = { .length = 100, .comp_mask = BUF | ADDR };
	void *buf = NULL, *other = NULL;
	struct ibv_mr *mr;
	char *start;

	IS_NULL(EINVAL, alloc_buf(pd, 0, &buf));
	IS_NULL(EINVAL, alloc_buf(pd, size, NULL));
	IS_NULL(EINVAL, alloc_buf(NULL, size, &buf));
	IS_NULL(ENOMEM, alloc_buf(pd, SIZE_MAX / 4, &buf));
	NEED((start = alloc_buf(pd, size, &buf)));
	NEED(alloc_buf(pd, 1, &other));
	CHECK(buf && (uintptr_t)start % sysconf(_SC_PAGESIZE) == 0);
	CHECK(start[0] == 0 && memcmp(start, start + 1, size - 1) == 0);
	memset(start, 1, size);

	IS_NULL(EINVAL, reg_buf_mr(pd, buf, start, size + 1, 0));
	IS_NULL(EINVAL, reg_buf_mr(pd, buf, start - 1, 10, 0));
	IS_NULL(EINVAL, reg_buf_mr(pd, buf, start + 1, SIZE_MAX, 0));
	IS_NULL(EINVAL, reg_buf_mr(other_pd, buf, start, size, 0));
	IS_NULL(EINVAL, reg_buf_mr(pd, other, start, size, 0));
	IS_NULL(EINVAL, reg_buf_mr(pd, NULL, start, size, 0));
	NEED((mr = reg_buf_mr(pd, buf, start + 1, size - 1, IBV_ACCESS_LOCAL_WRITE)));
	CHECK(mr->addr == start + 1 && mr->length == size - 1);
	CODE(0, ibv_dereg_mr(mr));
	a.buf = buf;
	a.addr = start;
	NEED((mr = reg_mr_ex(pd, &a)));
	CODE(0, ibv_dereg_mr(mr));
	a.comp_mask = BUF;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));
	a.comp_mask = BUF | ADDR | FD;
	IS_NULL(EINVAL, reg_mr_ex(pd, &a));

	MINUS_ONE(ENODATA, export_buf(buf));
	MINUS_ONE(EINVAL, export_buf(NULL));
	free_buf(other);
	/* The buffer keeps its domain in use until it is freed. */
	CODE(EBUSY, ibv_dealloc_pd(pd));
	free_buf(buf);
	free_buf(buf);
	CODE(0, ibv_dealloc_pd(pd));
	NEED((pd = ibv_alloc_pd(ctx)));
}

static void test_port(void)
{
	uint64_t speed = 0;
	struct verbs_context *v = verbs_get_ctx_op(ctx, query_port);
	/* The structure of later headers is one word longer than that of version 44. */
	union {
		struct ibv_port_attr attr;
		uint8_t octets[80];
		uint32_t words[20];
	} p;

	CODE(0, port_speed(ctx, 1, &speed));
	CHECK(speed == 100);
	CODE(EINVAL, port_speed(ctx, 2, &speed));
	CODE(EINVAL, port_speed(ctx, 1, NULL));
	CODE(EINVAL, port_speed(NULL, 1, &speed));

	memset(&p, 0xa5, sizeof(p));
	NEED(v);
	CODE(0, v->query_port(ctx, 1, &p.attr, 56));
	CHECK(p.words[13] == p.attr.active_speed && p.attr.active_speed == 4);
	CHECK(p.octets[56] == 0xa5);
	memset(&p, 0xa5, sizeof(p));
	CODE(0, v->query_port(ctx, 1, &p.attr, 52));
	CHECK(p.words[13] == 0xa5a5a5a5);

	/* Later headers have six operations before query_port. Their macro compares the structure's size,
	 * so the size must not include these operations. */
	CHECK(v->sz < sizeof(*v) - offsetof(struct verbs_context, query_port) + sizeof(void *));
	CHECK(!strcmp(ibv_event_type_str(20), "device link speed change"));
	CHECK(!strcmp(ibv_event_type_str(21), "unknown"));
}

static void test_unsupported_calls(void)
{
	char caps[64];

	IS_NULL(EOPNOTSUPP, alloc_dmah(ctx, caps));
	CODE(EOPNOTSUPP, dealloc_dmah(NULL));
	MINUS_ONE(EOPNOTSUPP, dm_export(NULL));
}

/* Providers (driver plug-ins) of every release find the symbol version that they were linked with.
 * Their registrations are ignored. */
static void test_providers(void)
{
	static const char *const versions[] = { "25", "33", "34", "57", "59", "64", "65" };
	int (*type)(struct ibv_context *, uint8_t, unsigned, int *);
	void (*add)(const void *);
	char version[40], name[40];
	int got;

	for (unsigned i = 0; i < sizeof(versions) / sizeof(versions[0]); i++) {
		snprintf(version, sizeof(version), "IBVERBS_PRIVATE_%s", versions[i]);
		snprintf(name, sizeof(name), "verbs_register_driver_%s", versions[i]);
		add = dlvsym(RTLD_DEFAULT, name, version);
		type = dlvsym(RTLD_DEFAULT, "ibv_query_gid_type", version);
		NEED(add && type);
		add(version);
		got = -1;
		CODE(0, type(ctx, 1, 0, &got));
		CODE(0, got);
		CHECK(dlvsym(RTLD_DEFAULT, "verbs_allow_disassociate_destroy", version));
	}
}

/* The function for the name of an operation has a private symbol version, although a header
 * declares it. */
static void test_operation_names(void)
{
	static const char *const versions[] = { "34", "57", "59", "64", "65" };
	const char *(*name)(unsigned);
	char version[40];

	for (int i = 0; i < 5; i++) {
		snprintf(version, sizeof(version), "IBVERBS_PRIVATE_%s", versions[i]);
		name = dlvsym(RTLD_DEFAULT, "ibv_wr_opcode_str", version);
		CHECK(name);
		if (!name)
			continue;
		CHECK(!strcmp(name(IBV_WR_RDMA_WRITE), "rdma-write"));
		CHECK(!strcmp(name(IBV_WR_SEND_WITH_INV), "send-with-inv"));
		CHECK(!strcmp(name(14), "flush") && !strcmp(name(15), "atomic-write"));
		CHECK(!strcmp(name(12), "unknown") && !strcmp(name(16), "unknown"));
	}
}

static struct rdma_event_channel *channel;

static void *write_user_event(void *id)
{
	usleep(20000);
	CODE(0, write_cm_event(id, 18, -77, 0x1122334455667788));
	return NULL;
}

/* A program can wake its own thread that waits for connection manager events. */
static void test_user_events(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	pthread_t thread;
	uint64_t arg;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	MINUS_ONE(EINVAL, write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0));
	MINUS_ONE(EINVAL, write_cm_event(id, 19, 0, 0));
	MINUS_ONE(EINVAL, write_cm_event(NULL, 18, 0, 0));
	NEED(pthread_create(&thread, NULL, write_user_event, id) == 0);
	NEED(rdma_get_cm_event(channel, &event) == 0);
	pthread_join(thread, NULL);
	memcpy(&arg, &event->param, sizeof(arg));
	CHECK(event->id == id && !event->listen_id && event->event == 18);
	CHECK(event->status == -77 && arg == 0x1122334455667788);
	CHECK(!strcmp(rdma_event_str(event->event), "RDMA_CM_EVENT_USER"));
	CODE(0, rdma_ack_cm_event(event));
	/* User events arrive in order. Destroying the identifier discards its unread events. */
	CODE(0, write_cm_event(id, 18, 1, 1));
	CODE(0, write_cm_event(id, 18, 2, 2));
	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE(1, event->status);
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_destroy_id(id));
	MINUS_ONE(EINVAL, write_cm_event(id, 18, 0, 0));
}

static int next_event(struct rdma_cm_id *id, int *status)
{
	struct rdma_cm_event *event;
	int kind;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CHECK(event->id == id);
	kind = event->event;
	*status = event->status;
	CODE(0, rdma_ack_cm_event(event));
	return kind;
}

static void test_resolve_addrinfo(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP };
	struct rdma_addrinfo *found = NULL;
	struct rdma_cm_id *id;
	int status;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	MINUS_ONE(ENOENT, query_addrinfo(id, &found));
	MINUS_ONE(EINVAL, query_addrinfo(id, NULL));
	hints.ai_flags = 0x10;
	MINUS_ONE(EOPNOTSUPP, resolve_addrinfo(id, NULL, "7", &hints));
	CODE(0, resolve_addrinfo(id, "127.0.0.1", "7471", NULL));
	CODE(16, next_event(id, &status));
	CODE(0, status);
	MINUS_ONE(EBUSY, resolve_addrinfo(id, "127.0.0.1", "7471", NULL));
	CODE(0, query_addrinfo(id, &found));
	MINUS_ONE(ENOENT, query_addrinfo(id, &found));
	CHECK(found->ai_dst_len == sizeof(struct sockaddr_in) && !found->ai_src_addr);
	CHECK(((struct sockaddr_in *)found->ai_dst_addr)->sin_port == htons(7471));
	CODE(0, rdma_resolve_addr(id, NULL, found->ai_dst_addr, 1000));
	CODE(RDMA_CM_EVENT_ADDR_RESOLVED, next_event(id, &status));
	rdma_freeaddrinfo(found);

	/* The call copies its arguments, so the program may free them immediately. */
	hints.ai_flags = RAI_NUMERICHOST | RAI_PASSIVE;
	char *node = strdup("::1");
	CODE(0, resolve_addrinfo(id, node, "7471", &hints));
	memset(node, 'x', strlen(node));
	memset(&hints, 0xff, sizeof(hints));
	free(node);
	CODE(16, next_event(id, &status));
	CODE(0, query_addrinfo(id, &found));
	CHECK(found->ai_family == AF_INET6 && found->ai_src_addr && !found->ai_dst_addr);
	rdma_freeaddrinfo(found);

	/* The result contains the source address of the hints. */
	struct sockaddr_in source = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	memset(&hints, 0, sizeof(hints));
	hints.ai_flags = RAI_NUMERICHOST;
	hints.ai_src_addr = (struct sockaddr *)&source;
	hints.ai_src_len = sizeof(source);
	CODE(0, resolve_addrinfo(id, "127.0.0.1", "7471", &hints));
	memset(&source, 0xff, sizeof(source));
	CODE(16, next_event(id, &status));
	CODE(0, query_addrinfo(id, &found));
	CHECK(found->ai_src_len == sizeof(source) && found->ai_src_addr && found->ai_dst_addr);
	CHECK(((struct sockaddr_in *)found->ai_src_addr)->sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	rdma_freeaddrinfo(found);

	memset(&hints, 0, sizeof(hints));
	hints.ai_flags = RAI_NUMERICHOST;
	CODE(0, resolve_addrinfo(id, "no.number", "7471", &hints));
	CODE(17, next_event(id, &status));
	CODE(-EADDRNOTAVAIL, status);
	MINUS_ONE(ENOENT, query_addrinfo(id, &found));
	/* Destroying the identifier frees a result that the program has not queried. */
	CODE(0, resolve_addrinfo(id, "127.0.0.1", NULL, &hints));
	CODE(0, rdma_destroy_id(id));

	/* Without a channel the call itself waits. */
	NEED(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CODE(0, resolve_addrinfo(id, "127.0.0.2", "1", NULL));
	CODE(0, query_addrinfo(id, &found));
	rdma_freeaddrinfo(found);
	MINUS_ONE(EADDRNOTAVAIL, resolve_addrinfo(id, "no.number", "1", &hints));
	CODE(0, rdma_destroy_id(id));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0]);
	NEED((ctx = ibv_open_device(list[0])));
	NEED((pd = ibv_alloc_pd(ctx)) && (other_pd = ibv_alloc_pd(ctx)));
	NEED((channel = rdma_create_event_channel()));
	test_registration();
	test_buffers();
	test_port();
	test_unsupported_calls();
	test_providers();
	test_operation_names();
	test_user_events();
	test_resolve_addrinfo();
	rdma_destroy_event_channel(channel);
	CODE(0, ibv_dealloc_pd(other_pd));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(ctx));
	ibv_free_device_list(list);
	return result();
}
