# What delayed tasks wait in on RabbitMQ, for celery_native_delay, as its settings ask for it:
#
#     celery -A PROJ delay export --format terraform
#
# Tasks wait in these queues. Other settings make another set: add that beside this one, and take
# this one away, with its prevent_destroy, once `delay status` with the old settings shows it empty.

terraform {
  required_providers {
    rabbitmq = {
      source  = "cyrilgdn/rabbitmq"
      version = ">= 1.8"
    }
  }
}

variable "vhost" {
  description = "The virtual host, which is there already."
  type        = string
  default     = @vhost@
}

variable "namespace" {
  description = "First word of every name: native_delay_namespace of the app."
  type        = string
  default     = @namespace@
}

locals {
  space = "${var.namespace}.@version@"
  set   = "${local.space}.@shape@"

  # A delay is a number of units of @resolution_ms@ ms: so many bits, most significant first.
  bits      = @bits@
  any_delay = join("", [for _ in range(local.bits) : "*."])

  # The delay levels. In each a message waits for `width` bits of its delay, from `bit` on, and
  # goes to `next`. A fused level has a queue for each value of its bits.
  levels = [
    @levels@
  ]

  level_queues = flatten([
    for level in local.levels : [
      for value in range(1, pow(2, level.width)) : {
        name   = level.fused ? format("%s-%x", level.name, value) : level.name
        value  = value
        bit    = level.bit
        ttl_ms = @resolution_ms@ * value * pow(2, level.bit)
        next   = level.next
      }
    ]
  ])

  # Where what has waited in higher levels arrives: nothing is above the highest.
  arrivals = slice(local.levels, 0, length(local.levels) - 1)

  exchanges = merge(
    {
      for level in local.arrivals : "${local.set}.${level.name}" => {
        type      = "topic"
        arguments = { "alternate-exchange" = "${local.space}.parked" }
      }
    },
    {
      for queue in local.level_queues : "${local.set}.${queue.name}.entry" => {
        type      = "fanout"
        arguments = {}
      }
    },
    {
      @exchanges@
    },
  )

  queues = merge(
    {
      for queue in local.level_queues : "${local.set}.${queue.name}" => {
        @level_arguments@
      }
    },
    {
      @queues@
    },
  )

  bindings = concat(
    # A message enters in front of the queue that it waits in first.
    [
      for queue in local.level_queues : {
        source      = "${local.set}.${queue.name}.entry"
        destination = "${local.set}.${queue.name}"
        type        = "queue"
        routing_key = ""
      }
    ],
    # From the exchange of a level straight to the next queue: that of the next bits that are set.
    flatten([
      for level in local.arrivals : [
        for queue in local.level_queues : {
          source      = "${local.set}.${level.name}"
          destination = "${local.set}.${queue.name}"
          type        = "queue"
          routing_key = join(".", concat(
            [for _ in range(local.bits - level.bit - level.width) : "*"],
            split("", format("%0${level.bit + level.width - queue.bit}b", queue.value)),
            [for _ in range(queue.bit) : "*"],
            ["#"],
          ))
        } if queue.bit <= level.bit
      ]
    ]),
    # And, when no bit is set any more, to its delivery.
    [
      for level in local.arrivals : {
        source      = "${local.set}.${level.name}"
        destination = "${local.set}.delivery"
        type        = "exchange"
        routing_key = join(".", concat(
          [for _ in range(local.bits - level.bit - level.width) : "*"],
          [for _ in range(level.bit + level.width) : "0"],
          ["#"],
        ))
      }
    ],
    [
      @bindings@
    ],
  )
}

resource "rabbitmq_exchange" "delay" {
  for_each = local.exchanges

  name  = each.key
  vhost = var.vhost

  settings {
    type        = each.value.type
    durable     = true
    auto_delete = false
    arguments   = each.value.arguments
  }
}

resource "rabbitmq_queue" "delay" {
  for_each = local.queues

  name  = each.key
  vhost = var.vhost

  settings {
    durable        = true
    auto_delete    = false
    arguments_json = jsonencode(each.value)
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "rabbitmq_binding" "delay" {
  for_each = {
    for binding in local.bindings :
    "${binding.source} ${binding.destination} ${binding.routing_key}" => binding
  }

  source           = each.value.source
  vhost            = var.vhost
  destination      = each.value.destination
  destination_type = each.value.type
  routing_key      = each.value.routing_key

  depends_on = [@bound@]
}

# Last, because by these producers and workers know that all the rest is there.
resource "rabbitmq_exchange" "ready" {
  for_each = toset(@ready@)

  name  = each.key
  vhost = var.vhost

  settings {
    type        = "fanout"
    durable     = true
    auto_delete = false
  }

  depends_on = [rabbitmq_binding.delay]
}
