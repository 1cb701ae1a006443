# The app's own queues, as Celery would declare them.

resource "rabbitmq_exchange" "own" {
  for_each = {
    @exchanges@
  }

  name  = each.key
  vhost = var.vhost

  settings {
    type        = each.value.type
    durable     = true
    auto_delete = false
    arguments   = each.value.arguments
  }
}

resource "rabbitmq_queue" "own" {
  for_each = {
    @queues@
  }

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

resource "rabbitmq_binding" "own" {
  for_each = {
    for binding in [
      @bindings@
    ] : "${binding.source} ${binding.destination} ${binding.routing_key}" => binding
  }

  source           = each.value.source
  vhost            = var.vhost
  destination      = each.value.destination
  destination_type = each.value.type
  routing_key      = each.value.routing_key
  @arguments@

  depends_on = [rabbitmq_exchange.own, rabbitmq_queue.own]
}
