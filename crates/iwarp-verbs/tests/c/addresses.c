/* Tests of addresses: the results of rdma_getaddrinfo, and the errors of rdma_bind_addr and
 * rdma_resolve_addr for unusable addresses. */
#include <arpa/inet.h>
#include <infiniband/ib.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>

#include "check.h"

static struct rdma_event_channel *channel;

static struct rdma_cm_id *new_id(void)
{
	struct rdma_cm_id *id = NULL;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

static struct sockaddr_in v4(const char *text, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };

	NEED(inet_pton(AF_INET, text, &a.sin_addr) == 1);
	return a;
}

static int same_v4(const struct sockaddr *got, socklen_t len, const char *text, int port)
{
	struct sockaddr_in want = v4(text, port);
	const struct sockaddr_in *in = (const struct sockaddr_in *)got;

	return got && len == sizeof(want) && in->sin_family == AF_INET && in->sin_port == want.sin_port &&
	       in->sin_addr.s_addr == want.sin_addr.s_addr;
}

/* rdma_getaddrinfo must return the first address that getaddrinfo returns for the same hints. */
static void check_name(const char *node, const char *service, int flags, int family)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_family = family,
		.ai_port_space = RDMA_PS_TCP }, *got;
	struct addrinfo plain = { .ai_family = family, .ai_protocol = IPPROTO_TCP }, *want;
	const struct sockaddr *address;
	socklen_t len;
	int code, passive = flags & RAI_PASSIVE;

	if (passive)
		plain.ai_flags |= AI_PASSIVE;
	if (flags & RAI_NUMERICHOST)
		plain.ai_flags |= AI_NUMERICHOST;
	code = getaddrinfo(node, service, &plain, &want);
	CODE(code, rdma_getaddrinfo(node, service, &hints, &got));
	if (code)
		return;
	address = passive ? got->ai_src_addr : got->ai_dst_addr;
	len = passive ? got->ai_src_len : got->ai_dst_len;
	CHECK(len == want->ai_addrlen && !memcmp(address, want->ai_addr, len));
	CHECK((passive ? got->ai_dst_addr : got->ai_src_addr) == NULL);
	CODE(want->ai_family, got->ai_family);
	CODE(passive, got->ai_flags);
	CODE(IBV_QPT_RC, got->ai_qp_type);
	CODE(RDMA_PS_TCP, got->ai_port_space);
	CHECK(!got->ai_next && !got->ai_src_canonname && !got->ai_dst_canonname);
	freeaddrinfo(want);
	rdma_freeaddrinfo(got);
}

static void test_names(void)
{
	const char *nodes[] = { "localhost", "127.0.0.1", "::1", "192.0.2.77", "no such name", NULL };
	const char *services[] = { "7471", "http", "no such service", NULL };
	const int families[] = { AF_UNSPEC, AF_INET, AF_INET6, AF_UNIX };
	const int flags[] = { 0, RAI_PASSIVE, RAI_NUMERICHOST, RAI_FAMILY, RAI_NOROUTE,
		RAI_FAMILY | RAI_PASSIVE };

	for (int n = 0; n < 6; n++)
		for (int s = 0; s < 4; s++)
			for (int a = 0; a < 4; a++)
				for (int f = 0; f < 6 && (nodes[n] || services[s]); f++)
					check_name(nodes[n], services[s], flags[f], families[a]);
}

/* If the hints have only a queue pair type or only a port space, the result has both. */
static void test_types_and_port_spaces(void)
{
	static const struct {
		int type, space, code, want_type, want_space;
	} rows[] = {
		{ 0, 0, 0, IBV_QPT_RC, RDMA_PS_TCP },
		{ IBV_QPT_RC, 0, 0, IBV_QPT_RC, RDMA_PS_TCP },
		{ IBV_QPT_UD, 0, 0, IBV_QPT_UD, RDMA_PS_UDP },
		{ 0, RDMA_PS_UDP, 0, IBV_QPT_UD, RDMA_PS_UDP },
		{ 0, RDMA_PS_TCP, 0, IBV_QPT_RC, RDMA_PS_TCP },
		{ 0, RDMA_PS_IB, 0, IBV_QPT_RC, RDMA_PS_IB },
		{ IBV_QPT_UC, RDMA_PS_IB, 0, IBV_QPT_UC, RDMA_PS_IB },
		{ IBV_QPT_UD, RDMA_PS_IB, 0, IBV_QPT_UD, RDMA_PS_IB },
		{ IBV_QPT_UD, RDMA_PS_TCP, EAI_SERVICE, 0, 0 },
	};
	struct rdma_addrinfo *got;

	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		struct rdma_addrinfo hints = { .ai_qp_type = rows[i].type, .ai_port_space = rows[i].space };
		int code = rdma_getaddrinfo("127.0.0.1", "7471", &hints, &got);

		/* Older versions of the C library return another code. */
		if (code == EAI_SOCKTYPE)
			code = EAI_SERVICE;
		CODE(rows[i].code, code);
		if (code)
			continue;
		CODE(rows[i].want_type, got->ai_qp_type);
		CODE(rows[i].want_space, got->ai_port_space);
		CHECK(same_v4(got->ai_dst_addr, got->ai_dst_len, "127.0.0.1", 7471));
		rdma_freeaddrinfo(got);
	}
}

static void test_hints(void)
{
	struct sockaddr_in from = v4("127.0.0.5", 0), to = v4("127.0.0.6", 99);
	struct rdma_addrinfo hints = { .ai_flags = RAI_NOROUTE, .ai_qp_type = IBV_QPT_RC,
		.ai_port_space = RDMA_PS_TCP }, *got;

	MINUS_ONE(EINVAL, rdma_getaddrinfo(NULL, NULL, NULL, &got));
	CODE(0, rdma_getaddrinfo("127.0.0.1", "5", NULL, &got));
	CHECK(got->ai_flags == 0 && same_v4(got->ai_dst_addr, got->ai_dst_len, "127.0.0.1", 5));
	rdma_freeaddrinfo(got);
	/* Without a name and a service, the result is a copy of the hints. */
	CODE(0, rdma_getaddrinfo(NULL, NULL, &hints, &got));
	CHECK(!got->ai_src_addr && !got->ai_dst_addr && !got->ai_src_len && !got->ai_dst_len);
	CODE(RAI_NOROUTE, got->ai_flags);
	rdma_freeaddrinfo(got);
	hints.ai_family = AF_INET;
	hints.ai_src_addr = (struct sockaddr *)&from;
	hints.ai_src_len = sizeof(from);
	hints.ai_dst_addr = (struct sockaddr *)&to;
	hints.ai_dst_len = sizeof(to);
	CODE(0, rdma_getaddrinfo(NULL, NULL, &hints, &got));
	CHECK(same_v4(got->ai_src_addr, got->ai_src_len, "127.0.0.5", 0));
	CHECK(same_v4(got->ai_dst_addr, got->ai_dst_len, "127.0.0.6", 99));
	CHECK(got->ai_src_addr != hints.ai_src_addr && got->ai_family == AF_INET &&
		got->ai_qp_type == IBV_QPT_RC);
	rdma_freeaddrinfo(got);
	/* A name replaces the destination, or with RAI_PASSIVE the source. */
	CODE(0, rdma_getaddrinfo("127.0.0.7", "8", &hints, &got));
	CHECK(same_v4(got->ai_src_addr, got->ai_src_len, "127.0.0.5", 0));
	CHECK(same_v4(got->ai_dst_addr, got->ai_dst_len, "127.0.0.7", 8));
	rdma_freeaddrinfo(got);
	hints.ai_flags = RAI_PASSIVE;
	CODE(0, rdma_getaddrinfo("127.0.0.7", "8", &hints, &got));
	CHECK(same_v4(got->ai_src_addr, got->ai_src_len, "127.0.0.7", 8) && !got->ai_dst_addr);
	rdma_freeaddrinfo(got);
	/* The library has no InfiniBand addresses. */
	hints = (struct rdma_addrinfo){ .ai_flags = RAI_FAMILY | RAI_NUMERICHOST, .ai_family = AF_IB };
	CODE(EAI_FAMILY, rdma_getaddrinfo("::1", NULL, &hints, &got));
	hints.ai_flags = 0;
	CODE(0, rdma_getaddrinfo("::1", NULL, &hints, &got));
	CODE(AF_INET6, got->ai_family);
	rdma_freeaddrinfo(got);
}

static void test_endpoints(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_family = AF_INET,
		.ai_port_space = RDMA_PS_TCP }, *info;
	struct rdma_cm_id *server, *client;
	char port[8];

	CODE(0, rdma_getaddrinfo("localhost", "0", &hints, &info));
	CODE(0, rdma_create_ep(&server, info, NULL, NULL));
	rdma_freeaddrinfo(info);
	CODE(0, rdma_listen(server, 0));
	snprintf(port, sizeof(port), "%d", ntohs(rdma_get_src_port(server)));
	hints.ai_flags = 0;
	CODE(0, rdma_getaddrinfo("localhost", port, &hints, &info));
	CODE(0, rdma_create_ep(&client, info, NULL, NULL));
	CHECK(rdma_get_dst_port(client) == rdma_get_src_port(server));
	CHECK(client->verbs != NULL);
	rdma_freeaddrinfo(info);
	rdma_destroy_ep(client);
	rdma_destroy_ep(server);
}

static void expect_resolved(struct rdma_cm_id *id)
{
	struct rdma_cm_event *event;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE(RDMA_CM_EVENT_ADDR_RESOLVED, event->event);
	CHECK(event->id == id && event->status == 0);
	CODE(0, rdma_ack_cm_event(event));
}

static void test_unusable_addresses(void)
{
	struct rdma_cm_id *id = new_id(), *other = new_id();
	struct sockaddr_in here = v4("127.0.0.1", 0), away = v4("192.0.2.254", 0), any = v4("0.0.0.0", 0),
		to = v4("127.0.0.1", 9);
	struct sockaddr_in6 here6 = { .sin6_family = AF_INET6, .sin6_port = htons(9),
		.sin6_addr = IN6ADDR_LOOPBACK_INIT };
	struct sockaddr_storage none = { .ss_family = AF_UNSPEC };
	struct sockaddr_storage local = { .ss_family = AF_UNIX };

#define RESOLVE(id, from, to) \
	rdma_resolve_addr(id, (struct sockaddr *)(from), (struct sockaddr *)(to), 1000)
	/* No device supports these address families. */
	MINUS_ONE(EINVAL, rdma_bind_addr(id, (struct sockaddr *)&local));
	MINUS_ONE(EINVAL, RESOLVE(id, NULL, &local));
	MINUS_ONE(EINVAL, RESOLVE(id, &none, &to));
	MINUS_ONE(EINVAL, RESOLVE(id, &local, &to));
	/* Addresses of other hosts. */
	MINUS_ONE(EADDRNOTAVAIL, rdma_bind_addr(id, (struct sockaddr *)&away));
	MINUS_ONE(EADDRNOTAVAIL, RESOLVE(id, &away, &to));
	MINUS_ONE(EINVAL, RESOLVE(id, &here6, &to));
	MINUS_ONE(EINVAL, RESOLVE(id, &here, &here6));
	MINUS_ONE(EINVAL, RESOLVE(id, &any, &here6));
	/* After these failures, the identifier can still be bound. */
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&here));
	MINUS_ONE(EINVAL, RESOLVE(id, NULL, &here6));
	/* A source port that is in use, and a free one. */
	here.sin_port = rdma_get_src_port(id);
	MINUS_ONE(EADDRINUSE, RESOLVE(other, &here, &to));
	CODE(0, rdma_destroy_id(id));
	CODE(0, RESOLVE(other, &here, &to));
	expect_resolved(other);
	CHECK(rdma_get_src_port(other) == here.sin_port);
	id = new_id();
	MINUS_ONE(EADDRINUSE, rdma_bind_addr(id, (struct sockaddr *)&here));
	CODE(0, rdma_destroy_id(other));
	CODE(0, rdma_destroy_id(id));
}

int main(void)
{
	channel = rdma_create_event_channel();
	NEED(channel);
	test_names();
	test_types_and_port_spaces();
	test_hints();
	test_endpoints();
	test_unusable_addresses();
	rdma_destroy_event_channel(channel);
	return result();
}
